//! A listed worker, and what becomes of it when it is listed anew.

use std::sync::Arc;

use tracing::info;

use super::model_set::ModelSet;
use super::worker::Worker;
use super::{Member, Status};

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) member: Member,
    pub(super) status: Status,
    /// The models of its facts; workers with the same models share one set.
    pub(super) models: Arc<ModelSet>,
    /// Drained by an operator, in addition to the discovery's `draining`.
    pub(super) is_drained: bool,
}

impl Entry {
    /// Takes over what an engine does not have to be restarted for: its load, its circuit breakers and its cached
    /// blocks stay. False if its name, role or TLS differs, or if another pod has its address: then it is another worker,
    /// with new connections.
    pub(super) fn update(&mut self, member: &Member) -> bool {
        let identity = |member: &Member| (member.name.clone(), member.role, member.tls.clone());
        let is_other_pod = member.is_other_pod(self.member.identity.as_ref());
        if is_other_pod || identity(member) != identity(&self.member) {
            return false;
        }
        self.status.draining = member.draining || self.is_drained;
        let draining = member.draining;
        let before = Member {
            draining,
            ..self.member.clone()
        };
        if before != *member {
            let worker = &self.status.worker;
            info!(worker = %member.name, "worker is listed with other properties; it keeps its load and its cached blocks");
            self.status.worker =
                Worker::new(worker.id, member, worker.pool.clone(), worker.state.clone());
        }
        self.member = member.clone();
        true
    }

    /// The engine may be another process now: its cache and its bootstrap info are not valid any more.
    pub(super) fn begin_incarnation(&mut self) {
        self.status.incarnation += 1;
        self.status.worker.forget_engine();
        self.status.worker.key.forget_refusal();
    }
}
