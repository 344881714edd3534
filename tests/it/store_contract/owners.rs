//! What every response store must do for owners: also in a cluster, and behind sentinels.

mod leases;
mod runs;

use warmroute::store::cancel::NoticeKind;
use warmroute::store::log::LogState;
use warmroute::store::redis::{Mode, Settings};
use warmroute::store::{
    CancelOutcome, CancelledOutput, DeleteOutcome, NoticeCursor, Orphan, OwnershipLoss, Takeover,
    WriteOutcome,
};

use super::*;
use crate::cluster::eventually;
use crate::redis_server;

/// Makes a test of each check, and one function that runs them all against one store.
macro_rules! checks {
    ($($module:ident::$name:ident,)*) => {
        $(#[tokio::test]
        async fn $name() {
            on_each(async |pair| $module::$name(pair).await).await;
        })*

        /// Each check gets an empty store, as two replicas that have just started see it.
        async fn all(empty: impl Fn(), open: impl Fn() -> Store) {
            $(
                eprintln!("{}", stringify!($name));
                empty();
                let (a, b, _server) = (open(), open(), None);
                $module::$name(&Pair { a, b, _server }).await;
            )*
        }
    };
}

checks! {
    runs::a_background_response_runs_under_its_owner_alone,
    runs::events_are_kept_in_order_without_holes,
    runs::the_tokens_of_events_are_for_the_next_owner_and_count_in_the_bound,
    runs::a_response_ends_once_with_its_last_events_and_knows_its_end_again,
    runs::a_cancel_ends_it_with_the_next_number_and_notifies_the_owner,
    runs::its_owner_alone_adds_the_output_to_a_cancelled_response_and_once,
    runs::what_is_deleted_stays_so_whatever_its_owner_writes,
    leases::a_dead_owners_work_is_adopted_by_one_and_the_dead_one_writes_nothing_more,
    leases::a_lease_runs_out_by_itself,
    leases::an_owner_finds_what_it_has_and_does_not_run,
    leases::released_work_is_anyones_at_once,
    leases::an_attempt_counts_when_an_engine_has_started_it_and_its_owner_was_lost,
    leases::the_output_of_a_cancelled_response_is_stored_by_another_if_its_owner_was_lost,
    leases::an_owner_that_asks_learns_what_it_has_lost,
    leases::orphans_of_one_tenant_at_its_limit_do_not_hide_the_others_from_a_scan,
}

#[tokio::test]
async fn all_that_owners_rely_on_holds_in_a_cluster() {
    let nodes = redis_server::cluster().await;
    let settings = Settings {
        mode: Mode::Cluster,
        urls: nodes.iter().map(Server::url).collect(),
        ..at(&nodes[0])
    };
    let empty = || {
        for node in &nodes {
            node.cli(&["flushall"]);
        }
    };
    all(empty, || open(&settings, &keep())).await;
}

#[tokio::test]
async fn all_that_owners_rely_on_holds_behind_sentinels() {
    let master = Server::start().await;
    let sentinel = Server::sentinel(&master).await;
    let settings = Settings {
        mode: Mode::Sentinel,
        master: "main".to_owned(),
        urls: vec![sentinel.url()],
        ..at(&master)
    };
    let empty = || drop(master.cli(&["flushall"]));
    all(empty, || open(&settings, &keep())).await;
}

async fn status(store: &Store, key: ResponseKey) -> Option<Status> {
    store.get(key).await.unwrap().map(|record| record.status)
}
