// SPDX-License-Identifier: Apache-2.0
// Certificate and key for listeners with TLS: read and checked here, so that a fault names the file; the HTTP library
// only says that it does not start. Handshakes run on the loop thread: an ECDSA key costs a third of an RSA one.
#include <gnutls/gnutls.h>
#include <gnutls/x509.h>
#include <string.h>
#include <time.h>

#include "server/file.h"
#include "server/http_private.h"

static gnutls_datum_t datum_of(const srv_buf *buf) {
    return (gnutls_datum_t){.data = (unsigned char *)buf->data, .size = (unsigned)buf->length};
}

static eng_status check_certificate(srv_tls *tls, const char *path, eng_error *error) {
    const gnutls_datum_t data = datum_of(&tls->certificate);
    gnutls_x509_crt_t *chain = NULL;
    unsigned count = 0;

    const int result = gnutls_x509_crt_list_import2(&chain, &count, &data, GNUTLS_X509_FMT_PEM, 0);
    if (result < 0)
        return eng_fail(error, ENG_INVALID, "%s: no certificate in PEM form: %s", path, gnutls_strerror(result));
    tls->expires = (int64_t)gnutls_x509_crt_get_expiration_time(chain[0]);
    for (unsigned i = 0; i < count; i++)
        gnutls_x509_crt_deinit(chain[i]);
    gnutls_free(chain);
    return ENG_OK;
}

static eng_status check_key(const srv_tls *tls, const char *path, eng_error *error) {
    const gnutls_datum_t data = datum_of(&tls->key);
    gnutls_x509_privkey_t key;

    if (gnutls_x509_privkey_init(&key) < 0)
        return eng_fail(error, ENG_NO_MEMORY, "%s: out of memory", path);
    const int result = gnutls_x509_privkey_import2(key, &data, GNUTLS_X509_FMT_PEM, NULL, 0);
    gnutls_x509_privkey_deinit(key);
    if (result < 0)
        return eng_fail(error, ENG_INVALID, "%s: no private key in PEM form without a password: %s", path,
                        gnutls_strerror(result));
    return ENG_OK;
}

static eng_status check_pair(const srv_tls *tls, const char *key_path, const char *cert_path, eng_error *error) {
    const gnutls_datum_t cert = datum_of(&tls->certificate), key = datum_of(&tls->key);
    gnutls_certificate_credentials_t credentials;

    if (gnutls_certificate_allocate_credentials(&credentials) < 0)
        return eng_fail(error, ENG_NO_MEMORY, "%s: out of memory", key_path);
    const int result = gnutls_certificate_set_x509_key_mem(credentials, &cert, &key, GNUTLS_X509_FMT_PEM);
    gnutls_certificate_free_credentials(credentials);
    if (result < 0)
        return eng_fail(error, ENG_INVALID, "%s: not the key of the certificate in %s", key_path, cert_path);
    return ENG_OK;
}

eng_status srv_tls_load(srv_tls *tls, const char *cert_path, const char *key_path, eng_error *error) {
    *tls = (srv_tls){0};
    srv_buf_init(&tls->certificate, SRV_MAX_PEM_BYTES);
    srv_buf_init(&tls->key, SRV_MAX_PEM_BYTES);
    eng_status status = srv_file_read(cert_path, &tls->certificate, error);
    if (!status)
        status = check_certificate(tls, cert_path, error);
    if (!status)
        status = srv_file_read(key_path, &tls->key, error);
    if (!status)
        status = check_key(tls, key_path, error);
    if (!status)
        status = check_pair(tls, key_path, cert_path, error);
    if (!status)
        tls->loaded = true;
    else
        srv_tls_clear(tls);
    return status;
}

bool srv_tls_expired(const srv_tls *tls) {
    return tls->expires >= 0 && tls->expires < (int64_t)time(NULL);
}

void srv_tls_clear(srv_tls *tls) {
    if (tls->key.data)
        gnutls_memset(tls->key.data, 0, tls->key.length);
    srv_buf_free(&tls->key);
    srv_buf_free(&tls->certificate);
    tls->loaded = false;
}

bool srv_tls_send(struct MHD_Connection *mhd, const char *data, size_t length) {
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_GNUTLS_SESSION);

    return info && gnutls_record_send((gnutls_session_t)info->tls_session, data, length) == (ssize_t)length;
}

eng_status srv_http_check_tls(const srv_config *config, eng_error *error) {
    srv_tls tls;
    const eng_status status = srv_tls_load(&tls, config->tls_cert, config->tls_key, error);

    srv_tls_clear(&tls);
    return status;
}
