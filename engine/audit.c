// SPDX-License-Identifier: Apache-2.0
// The job that reads again; see audit.h.
//
// It is a job like others, in the list of those that run, with the id 0 that no client's has: the scheduler composes
// its pieces last and tells nobody of it. Its session ends as a state at rest, to be compared.
#include "engine/audit.h"

#include <inttypes.h>
#include <string.h>

#include "engine/scheduler_internal.h"

void eng_audit_hit(eng_scheduler *scheduler, const eng_job *job) {
    eng_audit *audit = &scheduler->audit;
    if (scheduler->options.audit == 0 || ++audit->hits < scheduler->options.audit || audit->boundary)
        return;
    audit->prompt = eng_prompt_create(job->prompt->ids, (size_t)job->share.start->read + 1);
    if (!audit->prompt)
        return;
    audit->hits = 0;
    audit->knobs = job->turn.runs > 0 ? job->turn.run[0].knobs : job->knobs;
    audit->named = job->has_owner_name && job->share.chain.read == job->share.start->read;
    memcpy(audit->owner_name, job->owner_name, sizeof audit->owner_name);
    memcpy(audit->digest, job->share.chain.digest, sizeof audit->digest);
    audit->boundary = job->share.start;
    eng_boundary_retain(audit->boundary);
}

bool eng_audit_runs(const eng_scheduler *scheduler) {
    return scheduler->audit.job != NULL;
}

static void forget(eng_audit *audit) {
    eng_boundary_release(audit->boundary);
    eng_prompt_release(audit->prompt);
    audit->boundary = NULL;
    audit->prompt = NULL;
}

void eng_audit_stop(eng_scheduler *scheduler) {
    eng_audit *audit = &scheduler->audit;
    if (audit->job)
        eng_scheduler_drop(scheduler, &scheduler->running, audit->job);
    audit->job = NULL;
    forget(audit);
}

static eng_status make_job(eng_scheduler *scheduler, eng_job **out, eng_error *error) {
    eng_audit *audit = &scheduler->audit;
    const eng_request request = {.ids = audit->prompt->ids,
                                 .count = (size_t)audit->prompt->count,
                                 .knobs = audit->knobs,
                                 .logprobs = -1,
                                 .timeline_position = -1};
    eng_status status = eng_job_create(&scheduler->options.rules, &request, audit->prompt, 0, 0, out, error);
    if (status != ENG_OK)
        return status;
    if (eng_scheduler_join_owner(scheduler, *out, 0))
        return ENG_OK;
    eng_job_free(*out);
    return eng_fail(error, ENG_NO_MEMORY, "out of memory for an audit");
}

eng_status eng_audit_admit(eng_scheduler *scheduler, eng_error *error) {
    eng_audit *audit = &scheduler->audit;
    eng_error reason = {0};
    eng_job *job;
    if (!audit->boundary || audit->job || scheduler->waiting.head)
        return ENG_OK;
    eng_status status = make_job(scheduler, &job, error);
    if (status != ENG_OK)
        return status;
    status = eng_scheduler_make_session(scheduler, job, &reason);
    job->phase = ENG_PHASE_READING;
    eng_scheduler_append(&scheduler->running, job);
    audit->job = job;
    if (status != ENG_OK)
        eng_audit_stop(scheduler);
    return status == ENG_OK || status == ENG_FULL ? ENG_OK : eng_fail(error, status, "%s", reason.text);
}

static void condemn(eng_scheduler *scheduler) {
    scheduler->audit.mismatches++;
    eng_log(scheduler->options.log, ENG_LOG_ERROR,
            "a cached state behind %" PRId64
            " tokens is not what reading them again gives: the prefix cache is emptied",
            scheduler->audit.boundary->read);
    eng_prefix_purge(scheduler->options.prefix);
    if (scheduler->audit.named)
        eng_prefix_store_distrust(scheduler->options.prefix_store, scheduler->audit.owner_name,
                                  scheduler->audit.digest);
}

static eng_status compare(eng_scheduler *scheduler, eng_error *error) {
    const eng_audit *audit = &scheduler->audit;
    bool equal = true;
    eng_snapshot *again = eng_snapshot_keep(eng_prefix_snapshots(scheduler->options.prefix), &audit->job->session);
    eng_status status = ENG_OK;
    if (again)
        status = eng_snapshot_compare(audit->boundary->snapshot, again, &equal, error);
    eng_snapshot_release(again);
    if (status != ENG_OK && status != ENG_NO_MEMORY)
        return status;
    scheduler->audit.audits += again && status == ENG_OK;
    if (!equal)
        condemn(scheduler);
    return ENG_OK;
}

eng_status eng_audit_accepted(eng_scheduler *scheduler, eng_error *error) {
    const eng_audit *audit = &scheduler->audit;
    eng_status status = ENG_OK;
    if (audit->job->phase == ENG_PHASE_READING &&
        (audit->job->session.read < audit->boundary->read || audit->job->underway > 0))
        return ENG_OK;
    if (audit->job->phase == ENG_PHASE_READING) {
        eng_error reason = {0};
        status = compare(scheduler, &reason);
        if (status != ENG_OK)
            status = eng_fail(error, status, "%s", reason.text);
    }
    eng_audit_stop(scheduler);
    return status;
}
