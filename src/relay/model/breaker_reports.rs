//! What requests say of a worker, reported to its circuit breakers: that of the worker and that of its KV transfers.

use std::time::Instant;

use tracing::{info, warn};

use super::{ModelState, Shared};
use crate::fleet::{Role, Worker};
use crate::http::circuit_breaker::State;
use crate::ids::ClientKey;
use crate::observe;
use crate::relay::failure::evidence::NEXT_TRIAL_PAUSE;
use crate::relay::failure::failure_owner::FailureOwner;
use crate::relay::failure::open_share;

impl Shared {
    /// A worker has taken a new connection and answered a health check that began at `asked_at`.
    pub(in crate::relay) fn on_connected(&self, worker: &Worker, asked_at: Instant) {
        if worker.breaker.on_health_check(asked_at) {
            info!(
                worker = %worker.name,
                "circuit breaker closed; the worker takes connections again, and requests"
            );
            self.families.on_breaker_transition(worker, State::Closed);
        }
    }
}

impl ModelState {
    /// Reports a worker's answer to its circuit breaker, to a request that was sent at `sent`. `is_trial`: the request
    /// is the breaker's trial.
    pub(in crate::relay) fn report_success(
        &self,
        worker: &Worker,
        client: ClientKey,
        is_trial: bool,
        sent: Instant,
    ) {
        let now = observe::now();
        self.evidence.on_success(now, worker.id, client, sent);
        if worker.breaker.on_success(now, is_trial) {
            worker.key.log_next_refusal();
            info!(worker = %worker.name, "circuit breaker closed; the worker takes requests again");
            self.families.on_breaker_transition(worker, State::Closed);
        }
    }

    /// Counts a failure at a worker, and reports it to the worker's circuit breaker if the worker is to blame.
    /// `is_trial`: the request is the breaker's trial.
    pub(in crate::relay) fn report_failure(
        &self,
        worker: &Worker,
        client: ClientKey,
        is_trial: bool,
        owner: FailureOwner,
        reason: &str,
    ) {
        let now = observe::now();
        let is_unconnected = owner == FailureOwner::Worker;
        let state = worker.breaker.state();
        let failures = match owner {
            // One that was sent before the trial says nothing of it.
            FailureOwner::Worker => u32::from(state != State::HalfOpen || is_trial),
            FailureOwner::Request => {
                let is_unhealthy = worker.last_probe_error.load().is_some();
                let failures =
                    self.evidence
                        .on_failure(now, worker.id, client, state, is_unhealthy, is_trial);
                match state {
                    State::Closed if !is_unhealthy && !self.may_open_one_more(worker.role) => 0,
                    _ => failures,
                }
            }
            FailureOwner::Unattributed
            | FailureOwner::Router
            | FailureOwner::Client
            | FailureOwner::KvTransfer => 0,
        };
        let owner = match failures {
            0 => owner,
            _ => FailureOwner::Worker,
        };
        self.families.on_failure(&worker.name, owner);
        let has_opened = if is_unconnected {
            failures > 0 && worker.breaker.on_no_connection(now)
        } else {
            (0..failures).any(|_| worker.breaker.on_failure(now))
        };
        if has_opened {
            self.evidence.on_opened(worker.id);
            worker.on_breaker_open();
            let until = if worker.breaker.awaits_connection() {
                "a health check or a trial request"
            } else {
                "a trial request"
            };
            warn!(
                worker = %worker.name,
                reason,
                "circuit breaker open; the worker gets no requests until {until} succeeds"
            );
            self.families.on_breaker_transition(worker, State::Open);
        }
    }

    /// Reports to the circuit breaker of a prefill worker's KV transfers that a decode worker has the prompt of a
    /// client's request that was sent at `sent`. `is_trial`: the request is the breaker's trial.
    pub(in crate::relay) fn report_transferred(
        &self,
        prefill: &Worker,
        client: ClientKey,
        is_trial: bool,
        sent: Instant,
    ) {
        let now = observe::now();
        let evidence = &self.transfer_evidence;
        evidence.on_success(now, prefill.id, client, sent);
        if prefill.kv_transfer_breaker.on_success(now, is_trial) {
            info!(worker = %prefill.name, "KV transfer circuit breaker closed; the worker gets prefill legs again");
        }
    }

    /// Reports a failed transfer to the circuit breaker of a prefill worker's KV transfers. The engines' errors do not
    /// say whether that is due to the client's request. That an engine has never returned parameters is not. `is_trial`:
    /// the request is the breaker's trial.
    pub(in crate::relay) fn report_transfer_failure(
        &self,
        prefill: &Worker,
        client: ClientKey,
        is_trial: bool,
    ) {
        let now = observe::now();
        let breaker = &prefill.kv_transfer_breaker;
        let is_unhealthy = prefill.last_probe_error.load().is_some();
        let evidence = &self.transfer_evidence;
        let state = breaker.state();
        let failures = if prefill.returned_params.are_never_returned() {
            u32::from(state != State::HalfOpen || is_trial)
        } else {
            let failures =
                evidence.on_failure(now, prefill.id, client, state, is_unhealthy, is_trial);
            match state {
                State::Closed if !is_unhealthy && !self.may_stop_transfers() => 0,
                _ => failures,
            }
        };
        if failures == 0 && is_trial && state == State::HalfOpen {
            // The request may be to blame. One that was sent before the trial says nothing of it. Once another request
            // has closed the breaker, none is kept back.
            breaker.pause(now + NEXT_TRIAL_PAUSE);
        }
        if (0..failures).any(|_| breaker.on_failure(now)) {
            evidence.on_opened(prefill.id);
            warn!(
                worker = %prefill.name,
                "KV transfers from this worker fail; its KV transfer circuit breaker is open and it gets no prefill legs"
            );
        }
    }

    /// Reports that one worker alone has answered a client's request whose KV transfer had failed.
    pub(in crate::relay) fn report_whole(&self, client: ClientKey, is_success: bool) {
        self.transfer_evidence.on_whole(client, is_success);
    }

    /// Whether failed requests alone may open the circuit breaker of a worker of this role. A worker that refuses
    /// connections or fails health checks is not asked about.
    fn may_open_one_more(&self, role: Role) -> bool {
        self.has_room_for_one(role, |worker| worker.breaker.state() != State::Closed)
    }

    /// Whether failed transfers alone may open the circuit breaker of a prefill worker's transfers. Where no decode worker
    /// computes prompts, requests fail without prefill workers.
    fn may_stop_transfers(&self) -> bool {
        let is_out = |worker: &Worker| {
            let breakers = [&worker.breaker, &worker.kv_transfer_breaker];
            breakers
                .iter()
                .any(|breaker| breaker.state() != State::Closed)
        };
        self.computes_locally || self.has_room_for_one(Role::Prefill, is_out)
    }

    fn has_room_for_one(&self, role: Role, is_open: impl Fn(&Worker) -> bool) -> bool {
        let snapshot = self.fleet.snapshot();
        snapshot.models.get(&self.name).is_none_or(|group| {
            let workers = group.workers.iter();
            let seen = workers.map(|worker| (worker.role, is_open(worker)));
            open_share::may_open_one_more(role, self.computes_locally, seen)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::fleet::registry::tests::worker;
    use crate::ids::Model;
    use crate::observe::metrics;
    use crate::relay::model::tests::models;

    fn model() -> Arc<ModelState> {
        models(&metrics::Registry::default()).of(&Model::from("m"))
    }

    /// A worker whose KV transfers failed, so that the circuit breaker for them opened, and is half-open from the time that is
    /// returned: its trial runs.
    fn with_trial_transfer(model: &ModelState) -> (Arc<Worker>, Instant) {
        let prefill = worker("p");
        for client in [1, 2, 1, 2, 1, 2] {
            model.report_transfer_failure(&prefill, ClientKey(client), false);
        }
        let (now, breaker) = (observe::now(), &prefill.kv_transfer_breaker);
        assert!(breaker.admit(now + Duration::from_secs(3_600)));
        assert_eq!(breaker.state(), State::HalfOpen);
        (prefill, now)
    }

    #[test]
    fn a_request_from_before_a_breaker_opened_takes_no_success_from_its_trial() {
        let (model, worker) = (model(), worker("a"));
        let now = observe::now();
        while !worker.breaker.on_failure(now) {}
        assert!(worker.breaker.admit(now + Duration::from_secs(3_600)));
        for owner in [FailureOwner::Request, FailureOwner::Worker] {
            model.report_failure(&worker, ClientKey(1), false, owner, "502");
            assert_eq!(worker.breaker.state(), State::HalfOpen, "{owner:?}");
        }
        model.report_success(&worker, ClientKey(2), true, now);
        assert_eq!(worker.breaker.state(), State::Closed);
    }

    #[test]
    fn a_request_from_before_a_breaker_opened_does_not_close_it() {
        let (model, worker) = (model(), worker("a"));
        let now = observe::now();
        let breakers = [&worker.breaker, &worker.kv_transfer_breaker];
        for breaker in breakers {
            while !breaker.on_failure(now) {}
        }
        let ends_well = |is_trial: bool| {
            model.report_success(&worker, ClientKey(1), is_trial, now);
            model.report_transferred(&worker, ClientKey(1), is_trial, now);
        };
        let are = |state: State| breakers.iter().all(|breaker| breaker.state() == state);
        ends_well(false);
        assert!(are(State::Open));
        for breaker in breakers {
            assert!(breaker.admit(now + Duration::from_secs(3_600)));
        }
        ends_well(false);
        assert!(are(State::HalfOpen));
        ends_well(true);
        assert!(are(State::Closed));
    }

    #[test]
    fn a_trial_that_gets_no_connection_opens_its_breaker_again() {
        let (model, worker) = (model(), worker("a"));
        let now = observe::now();
        while !worker.breaker.on_no_connection(now) {}
        assert!(worker.breaker.admit(now + Duration::from_secs(3_600)));
        model.report_failure(&worker, ClientKey(1), true, FailureOwner::Worker, "connect");
        assert_eq!(worker.breaker.state(), State::Open);
    }

    #[test]
    fn a_trial_transfer_for_which_its_client_may_be_to_blame_is_not_followed_by_the_next_at_once() {
        let model = model();
        let (prefill, now) = with_trial_transfer(&model);
        let (breaker, admitted) = (
            &prefill.kv_transfer_breaker,
            now + Duration::from_secs(3_600),
        );
        // One that was sent before it opened.
        model.report_transfer_failure(&prefill, ClientKey(1), false);
        breaker.release_trial(admitted, now);
        assert!(breaker.admit(now));
        model.report_transfer_failure(&prefill, ClientKey(1), true);
        breaker.release_trial(now, now);
        assert_eq!(breaker.state(), State::HalfOpen);
        assert!(!breaker.may_admit(now));
        assert!(breaker.may_admit(observe::now() + NEXT_TRIAL_PAUSE));
    }

    #[test]
    fn a_trial_transfer_that_fails_once_the_breaker_is_closed_keeps_no_others_back() {
        let model = model();
        let (prefill, now) = with_trial_transfer(&model);
        let breaker = &prefill.kv_transfer_breaker;
        model.report_transferred(&prefill, ClientKey(3), true, now);
        model.report_transfer_failure(&prefill, ClientKey(1), true);
        assert_eq!(breaker.state(), State::Closed);
        assert!(breaker.may_admit(now));
    }

    #[test]
    fn one_clients_transfers_count_against_an_engine_that_has_never_returned_parameters() {
        let opens = |has_returned: bool| {
            let (model, prefill) = (model(), worker("p"));
            if has_returned {
                prefill.returned_params.on_returned();
            }
            for _ in 0..9 {
                prefill.returned_params.on_missing(observe::now());
                model.report_transfer_failure(&prefill, ClientKey(1), false);
            }
            prefill.kv_transfer_breaker.state() == State::Open
        };
        assert!(opens(false));
        assert!(!opens(true));
    }
}
