// SPDX-License-Identifier: Apache-2.0
// Certificate and key for listeners with TLS: read and checked here, so that a fault names the file, and handed out at
// each handshake, so that a new pair needs no restart and ends no connection. Handshakes run on the loop thread: an
// ECDSA key costs a third of an RSA one.
#include <gnutls/abstract.h>
#include <gnutls/gnutls.h>
#include <gnutls/x509.h>
#include <stdlib.h>
#include <time.h>

#include "server/file.h"
#include "server/http_private.h"

struct srv_tls {
    gnutls_pcert_st *chain;
    unsigned count;
    gnutls_privkey_t key;
    int64_t expires; // Unix seconds
    srv_tls *older;
};

static gnutls_datum_t datum_of(const srv_buf *buf) {
    return (gnutls_datum_t){.data = (unsigned char *)buf->data, .size = (unsigned)buf->length};
}

static eng_status take_chain(srv_tls *tls, gnutls_x509_crt_t *list, unsigned count, const char *path,
                             eng_error *error) {
    tls->chain = calloc(count, sizeof *tls->chain);
    if (!tls->chain)
        return eng_fail(error, ENG_NO_MEMORY, "%s: out of memory", path);
    const int result = gnutls_pcert_import_x509_list(tls->chain, list, &count, GNUTLS_X509_CRT_LIST_SORT);
    if (result < 0)
        return eng_fail(error, ENG_INVALID, "%s: no chain of certificates: %s", path, gnutls_strerror(result));
    tls->count = count;
    return ENG_OK;
}

static eng_status read_chain(srv_tls *tls, const srv_buf *pem, const char *path, eng_error *error) {
    const gnutls_datum_t data = datum_of(pem);
    gnutls_x509_crt_t *list = NULL;
    unsigned count = 0;

    const int result = gnutls_x509_crt_list_import2(&list, &count, &data, GNUTLS_X509_FMT_PEM, 0);
    if (result < 0)
        return eng_fail(error, ENG_INVALID, "%s: no certificate in PEM form: %s", path, gnutls_strerror(result));
    tls->expires = (int64_t)gnutls_x509_crt_get_expiration_time(list[0]);
    const eng_status status = take_chain(tls, list, count, path, error);
    for (unsigned i = 0; i < count; i++)
        gnutls_x509_crt_deinit(list[i]);
    gnutls_free(list);
    return status;
}

static eng_status read_key(srv_tls *tls, const srv_buf *pem, const char *path, eng_error *error) {
    const gnutls_datum_t data = datum_of(pem);

    if (gnutls_privkey_init(&tls->key) < 0)
        return eng_fail(error, ENG_NO_MEMORY, "%s: out of memory", path);
    const int result = gnutls_privkey_import_x509_raw(tls->key, &data, GNUTLS_X509_FMT_PEM, NULL, 0);
    if (result < 0)
        return eng_fail(error, ENG_INVALID, "%s: no private key in PEM form without a password: %s", path,
                        gnutls_strerror(result));
    return ENG_OK;
}

static eng_status check_pair(const srv_buf *certificate, const srv_buf *private_key, const char *cert_path,
                             const char *key_path, eng_error *error) {
    const gnutls_datum_t cert = datum_of(certificate), key = datum_of(private_key);
    gnutls_certificate_credentials_t credentials;

    if (gnutls_certificate_allocate_credentials(&credentials) < 0)
        return eng_fail(error, ENG_NO_MEMORY, "%s: out of memory", key_path);
    const int result = gnutls_certificate_set_x509_key_mem(credentials, &cert, &key, GNUTLS_X509_FMT_PEM);
    gnutls_certificate_free_credentials(credentials);
    if (result < 0)
        return eng_fail(error, ENG_INVALID, "%s: not the key of the certificate in %s", key_path, cert_path);
    return ENG_OK;
}

static eng_status read_pair(srv_tls *tls, const char *cert_path, const char *key_path, eng_error *error) {
    srv_buf certificate, key;

    srv_buf_init(&certificate, SRV_MAX_PEM_BYTES);
    srv_buf_init(&key, SRV_MAX_PEM_BYTES);
    eng_status status = srv_file_read(cert_path, &certificate, error);
    if (!status)
        status = read_chain(tls, &certificate, cert_path, error);
    if (!status)
        status = srv_file_read(key_path, &key, error);
    if (!status)
        status = read_key(tls, &key, key_path, error);
    if (!status)
        status = check_pair(&certificate, &key, cert_path, key_path, error);
    if (key.data)
        gnutls_memset(key.data, 0, key.length);
    srv_buf_free(&key);
    srv_buf_free(&certificate);
    return status;
}

eng_status srv_tls_load(const char *cert_path, const char *key_path, srv_tls **out, eng_error *error) {
    srv_tls *tls = calloc(1, sizeof *tls);

    if (!tls)
        return eng_fail(error, ENG_NO_MEMORY, "%s: out of memory", cert_path);
    const eng_status status = read_pair(tls, cert_path, key_path, error);
    if (status) {
        srv_tls_free(tls);
        return status;
    }
    *out = tls;
    return ENG_OK;
}

bool srv_tls_expired(const srv_tls *tls) {
    return tls->expires >= 0 && tls->expires < (int64_t)time(NULL);
}

void srv_tls_free(srv_tls *tls) {
    while (tls) {
        srv_tls *older = tls->older;
        for (unsigned i = 0; i < tls->count; i++)
            gnutls_pcert_deinit(&tls->chain[i]);
        free(tls->chain);
        if (tls->key)
            gnutls_privkey_deinit(tls->key);
        free(tls);
        tls = older;
    }
}

// The library has set the session's pointer to its connection.
static int retrieve(gnutls_session_t session, const gnutls_datum_t *names, int name_count,
                    const gnutls_pk_algorithm_t *algorithms, int algorithm_count, gnutls_pcert_st **chain,
                    unsigned *count, gnutls_privkey_t *key) {
    struct MHD_Connection *mhd = gnutls_session_get_ptr(session);
    const union MHD_ConnectionInfo *info =
        mhd ? MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_SOCKET_CONTEXT) : NULL;
    const srv_connection *connection = info ? info->socket_context : NULL;
    (void)names, (void)name_count, (void)algorithms, (void)algorithm_count;

    if (!connection)
        return -1;
    const srv_tls *tls = connection->listener->http->tls;
    *chain = tls->chain;
    *count = tls->count;
    *key = tls->key;
    return 0;
}

struct MHD_OptionItem srv_tls_option(void) {
    return (struct MHD_OptionItem){MHD_OPTION_HTTPS_CERT_CALLBACK, 0, (void *)retrieve};
}

void srv_http_replace_tls(srv_http *http, srv_tls *tls) {
    tls->older = http->tls;
    http->tls = tls;
}

bool srv_tls_send(struct MHD_Connection *mhd, const char *data, size_t length) {
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_GNUTLS_SESSION);

    return info && gnutls_record_send((gnutls_session_t)info->tls_session, data, length) == (ssize_t)length;
}
