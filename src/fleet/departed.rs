//! Workers that left the fleet while requests ran at them. Load belongs to the process and not to its entry in a list: a
//! worker that is listed again has the load of the requests that still run at it. Pure.

use std::sync::{Arc, Weak};

use super::Member;
use super::worker::{Worker, WorkerState};
use crate::http::client::Pool;

/// The workers that left, as long as requests run at them. There are never more than such requests, and those that have
/// ended since the last change of a list.
#[derive(Debug, Default)]
pub(super) struct Departed(Vec<Left>);

#[derive(Debug)]
struct Left {
    member: Member,
    /// The requests that run there hold it.
    state: Weak<WorkerState>,
    pool: Weak<Pool>,
}

impl Left {
    /// Nothing if no request runs there any more.
    fn running(&self) -> Option<Arc<WorkerState>> {
        let state = self.state.upgrade()?;
        (state.load.own_requests() > 0).then_some(state)
    }
}

impl Departed {
    pub(super) fn add(&mut self, member: &Member, worker: &Worker) {
        self.0.retain(|left| left.running().is_some());
        self.0.push(Left {
            member: member.clone(),
            state: Arc::downgrade(&worker.state),
            pool: Arc::downgrade(&worker.pool),
        });
    }

    /// What a worker that joins has from before: its state, and its connections if they are those that it is listed
    /// with. Nothing if it is known to be another process.
    pub(super) fn take(
        &mut self,
        member: &Member,
    ) -> Option<(Arc<WorkerState>, Option<Arc<Pool>>)> {
        let index = self.0.iter().position(|left| {
            let before = &left.member;
            before.address == member.address && !member.is_other_pod(before.identity.as_ref())
        })?;
        let left = self.0.swap_remove(index);
        let pool = left
            .pool
            .upgrade()
            .filter(|_| left.member.tls == member.tls);
        Some((left.running()?, pool))
    }

    /// The addresses at which requests of workers that left still run.
    pub(super) fn running(&self) -> impl Iterator<Item = (Arc<str>, Arc<WorkerState>)> {
        let running = self.0.iter();
        running.filter_map(|left| Some((left.member.address.as_str().into(), left.running()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::in_flight::InFlight;
    use super::super::registry::Registry;
    use super::super::registry::tests::{member, registry};
    use super::super::{Member, Role};
    use super::*;
    use crate::http::tls::ClientSettings;

    fn only(registry: &Registry) -> Arc<Worker> {
        registry.snapshot().workers[0].worker.clone()
    }

    fn list(registry: &Registry, members: &[Member]) {
        registry.set_members("file", members.to_vec());
    }

    /// A worker that is listed as `before` runs three requests, leaves, and is listed as `after`. Returns its requests then and
    /// after one of them ended.
    fn check(before: &Member, after: &Member, expected: (u32, u32)) {
        let registry = registry(&[]);
        list(&registry, std::slice::from_ref(before));
        let first = only(&registry);
        let mut running: Vec<InFlight> = (0..3)
            .map(|_| InFlight::new(first.clone(), 10, 0))
            .collect();
        list(&registry, &[]);
        list(&registry, std::slice::from_ref(after));
        let back = only(&registry);
        assert_ne!(back.id, first.id, "its cached blocks are not known");
        let found = back.load.requests();
        running.pop();
        assert_eq!((found, back.load.requests()), expected, "{after:?}");
        running.clear();
        assert_eq!(back.load.requests(), 0);
    }

    fn pod(uid: &str) -> Member {
        Member {
            identity: Some(uid.into()),
            ..member("a")
        }
    }

    #[test]
    fn a_worker_that_comes_back_has_the_requests_that_still_run_at_it() {
        check(&member("a"), &member("a"), (3, 2));
        let renamed = Member {
            name: "b".to_owned(),
            role: Role::Decode,
            ..member("a")
        };
        check(&member("a"), &renamed, (3, 2));
        let over_tls = Member {
            tls: Some(ClientSettings::default()),
            ..member("a")
        };
        check(&member("a"), &over_tls, (3, 2));
        check(&pod("1"), &pod("1"), (3, 2));
        // Two lists know it, and one of them knows which pod it is.
        check(&pod("1"), &member("a"), (3, 2));
    }

    #[test]
    fn another_process_has_none_of_them() {
        check(&pod("1"), &pod("2"), (0, 0));
        let elsewhere = Member {
            address: "b.test:8000".to_owned(),
            ..member("a")
        };
        check(&member("a"), &elsewhere, (0, 0));
    }

    #[test]
    fn a_worker_that_is_renamed_in_its_list_keeps_its_load_and_its_connections() {
        let registry = registry(&["a"]);
        let first = only(&registry);
        let _running = InFlight::new(first.clone(), 10, 0);
        let renamed = Member {
            name: "b".to_owned(),
            ..member("a")
        };
        registry.set_members("static", vec![renamed]);
        let renamed = only(&registry);
        assert_eq!((&*renamed.name, renamed.load.requests()), ("b", 1));
        assert!(Arc::ptr_eq(&renamed.pool, &first.pool));
    }

    #[test]
    fn it_leaves_again_and_again_and_is_remembered_once_and_only_while_requests_run() {
        let registry = registry(&[]);
        let mut running = Vec::new();
        for _ in 0..5 {
            list(&registry, &[member("a"), member("b")]);
            running.push(InFlight::new(only(&registry), 10, 0));
            list(&registry, &[]);
            let departed = registry.departed();
            let addresses: Vec<&str> = departed.iter().map(|(address, _)| &**address).collect();
            assert_eq!(addresses, ["a.test:8000"]);
        }
        list(&registry, &[member("a")]);
        assert_eq!(only(&registry).load.requests(), 5);
        list(&registry, &[]);
        running.clear();
        assert!(registry.departed().is_empty());
        list(&registry, &[member("a")]);
        let back = only(&registry);
        assert_eq!(back.load.requests(), 0);
    }
}
