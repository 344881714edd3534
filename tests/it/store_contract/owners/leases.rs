//! Leases, orphans, and what an owner has lost.

use std::collections::BTreeSet;

use super::*;

pub(super) async fn a_dead_owners_work_is_adopted_by_one_and_the_dead_one_writes_nothing_more(
    Pair { a, b, .. }: &Pair,
) {
    let lease = Duration::from_millis(300);
    a.heartbeat(OWNER, "a", lease).await.unwrap();
    b.heartbeat(OTHER, "b", LEASE).await.unwrap();
    let (key, ended) = (new_key(), new_key());
    a.create(key, queued()).await.unwrap();
    assert_eq!(
        a.append(key, FENCE, batch(0, 2)).await.unwrap(),
        WriteOutcome::Done
    );
    a.create(ended, queued()).await.unwrap();
    assert_eq!(
        a.finalize(ended, FENCE, ending(Status::Completed))
            .await
            .unwrap(),
        WriteOutcome::Done
    );
    let orphan = Orphan {
        key,
        owner: Some(OWNER),
        fencing_number: 1,
    };
    a.heartbeat(OWNER, "a", LEASE).await.unwrap();
    assert_eq!(b.orphans(9).await.unwrap(), []);
    assert_eq!(b.take_over(orphan, OTHER).await.unwrap(), Takeover::Raced);
    a.end_lease(OWNER).await.unwrap();
    assert_eq!(b.orphans(9).await.unwrap(), [orphan]);

    let Takeover::Done(adopted) = b.take_over(orphan, OTHER).await.unwrap() else {
        panic!("not adopted");
    };
    let fence = FencingToken {
        owner: OTHER,
        number: 2,
    };
    assert_eq!((adopted.fence, adopted.status), (fence, Status::Queued));
    assert_eq!(
        (adopted.attempts, adopted.last_event, adopted.streams),
        (1, Some(2), true)
    );
    assert_eq!(adopted.lost_owners, 1);
    let request = b.request(key).await.unwrap();
    assert_eq!(request, Some(Bytes::from_static(b"{\"request\":1}")));
    // Its answer was lost.
    assert_eq!(
        b.take_over(orphan, OTHER).await.unwrap(),
        Takeover::Done(adopted)
    );
    assert_eq!(
        a.take_over(orphan, Owner(0xc)).await.unwrap(),
        Takeover::Raced
    );
    assert_eq!(b.orphans(9).await.unwrap(), []);

    assert_eq!(a.start(key, FENCE).await.unwrap(), WriteOutcome::Fenced);
    assert_eq!(
        a.append(key, FENCE, batch(3, 3)).await.unwrap(),
        WriteOutcome::Fenced
    );
    assert_eq!(
        a.finalize(key, FENCE, ending(Status::Failed))
            .await
            .unwrap(),
        WriteOutcome::Fenced
    );
    assert_eq!(b.start(key, fence).await.unwrap(), WriteOutcome::Done);
    assert_eq!(
        b.append(key, fence, batch(3, 3)).await.unwrap(),
        WriteOutcome::Done
    );
    assert_eq!(
        b.finalize(key, fence, ending(Status::Completed))
            .await
            .unwrap(),
        WriteOutcome::Done
    );
    let late = Takeover::Terminal(Status::Completed);
    assert_eq!(a.take_over(orphan, Owner(0xc)).await.unwrap(), late);
    let unknown = Orphan {
        key: new_key(),
        ..orphan
    };
    assert_eq!(a.take_over(unknown, OTHER).await.unwrap(), Takeover::Gone);
}

pub(super) async fn a_lease_runs_out_by_itself(Pair { a, b, .. }: &Pair) {
    a.heartbeat(OWNER, "a", Duration::from_millis(200))
        .await
        .unwrap();
    let key = new_key();
    a.create(key, queued()).await.unwrap();
    eventually("it is an orphan", async || {
        b.orphans(9).await.unwrap().len() == 1
    })
    .await;
}

pub(super) async fn an_owner_finds_what_it_has_and_does_not_run(Pair { a, b, .. }: &Pair) {
    a.heartbeat(OWNER, "a", LEASE).await.unwrap();
    let keys = [(); 5].map(|()| new_key());
    let [runs, stray, ended, released, fresh] = keys;
    for key in [runs, stray, ended, released] {
        a.create(key, queued()).await.unwrap();
    }
    let end = ending(Status::Failed);
    assert_eq!(
        a.finalize(ended, FENCE, end).await.unwrap(),
        WriteOutcome::Done
    );
    assert_eq!(
        a.release(released, FENCE).await.unwrap(),
        WriteOutcome::Done
    );
    let found = a.untracked(OWNER, vec![runs, fresh], 9).await.unwrap();
    assert_eq!(found, [(stray, FENCE)]);
    assert_eq!(a.untracked(OWNER, vec![runs, stray], 9).await.unwrap(), []);
    assert_eq!(b.untracked(OTHER, Vec::new(), 9).await.unwrap(), []);
    assert_eq!(a.release(stray, FENCE).await.unwrap(), WriteOutcome::Done);
    assert_eq!(b.orphans(9).await.unwrap().len(), 2);
}

pub(super) async fn released_work_is_anyones_at_once(Pair { a, b, .. }: &Pair) {
    a.heartbeat(OWNER, "a", LEASE).await.unwrap();
    let key = new_key();
    a.create(key, queued()).await.unwrap();
    assert_eq!(a.release(key, FENCE).await.unwrap(), WriteOutcome::Done);
    assert_eq!(a.start(key, FENCE).await.unwrap(), WriteOutcome::Fenced);
    let orphan = Orphan {
        key,
        owner: None,
        fencing_number: 2,
    };
    assert_eq!(b.orphans(9).await.unwrap(), [orphan]);
    assert!(matches!(
        b.take_over(orphan, OTHER).await.unwrap(),
        Takeover::Done(_)
    ));
    // Released and cancelled while it has no owner.
    let key = new_key();
    a.create(key, queued()).await.unwrap();
    assert_eq!(a.release(key, FENCE).await.unwrap(), WriteOutcome::Done);
    let done = CancelOutcome::Done {
        was: Status::Queued,
        owner: None,
    };
    assert_eq!(b.cancel(key, cancelling()).await.unwrap(), done);
}

pub(super) async fn an_attempt_counts_when_an_engine_has_started_it_and_its_owner_was_lost(
    Pair { a, b, .. }: &Pair,
) {
    let key = new_key();
    a.create(key, queued()).await.unwrap();
    let mut orphan = Orphan {
        key,
        owner: Some(OWNER),
        fencing_number: 1,
    };
    // (who takes it over, whether an engine starts it, whether it is released), and what the next one finds.
    for (owner, is_started, is_released, attempts, lost) in [
        (OTHER, false, true, 1, 1),
        (OWNER, false, false, 1, 1),
        (OTHER, true, true, 1, 2),
        (OWNER, true, false, 1, 2),
        (OTHER, true, false, 2, 3),
        (OWNER, false, false, 3, 4),
    ] {
        let Takeover::Done(adopted) = b.take_over(orphan, owner).await.unwrap() else {
            panic!("not adopted");
        };
        assert_eq!((adopted.attempts, adopted.lost_owners), (attempts, lost));
        let fence = adopted.fence;
        if is_started {
            assert_eq!(a.start(key, fence).await, Ok(WriteOutcome::Done));
        }
        orphan = Orphan {
            key,
            owner: Some(owner),
            fencing_number: fence.number,
        };
        if is_released {
            assert_eq!(a.release(key, fence).await, Ok(WriteOutcome::Done));
            (orphan.owner, orphan.fencing_number) = (None, fence.number + 1);
        }
    }
}

pub(super) async fn the_output_of_a_cancelled_response_is_stored_by_another_if_its_owner_was_lost(
    Pair { a, b, .. }: &Pair,
) {
    a.heartbeat(OWNER, "a", LEASE).await.unwrap();
    let (key, unseen) = (new_key(), new_key());
    for key in [key, unseen] {
        a.create(key, queued()).await.unwrap();
    }
    assert_eq!(
        a.append(key, FENCE, batch(0, 4)).await,
        Ok(WriteOutcome::Done)
    );
    for key in [key, unseen] {
        let cancelled = b.cancel(key, cancelling()).await.unwrap();
        assert!(matches!(cancelled, CancelOutcome::Done { .. }));
    }
    assert_eq!(b.orphans(9).await.unwrap(), []);
    a.end_lease(OWNER).await.unwrap();
    let orphan = Orphan {
        key,
        owner: Some(OWNER),
        fencing_number: 1,
    };
    assert_eq!(b.orphans(9).await.unwrap(), [orphan]);
    let Takeover::Done(adopted) = b.take_over(orphan, OTHER).await.unwrap() else {
        panic!("not adopted");
    };
    assert_eq!(
        (adopted.status, adopted.last_event),
        (Status::Cancelled, Some(5))
    );
    assert!(b.request(key).await.unwrap().is_some());
    let output = CancelledOutput {
        content: ending(Status::Cancelled).content,
        delta_table: Bytes::from_static(b"cut"),
    };
    let late = a.finalize_cancelled(key, FENCE, output.clone()).await;
    assert_eq!(late, Ok(WriteOutcome::Fenced));
    let stored = b.finalize_cancelled(key, adopted.fence, output).await;
    assert_eq!(stored, Ok(WriteOutcome::Done));
    let record = a.get(key).await.unwrap().unwrap();
    assert_eq!(record.status, Status::Cancelled);
    assert_eq!(record.content.output, Bytes::from_static(b"[\"final\"]"));
    assert_eq!(b.request(key).await.unwrap(), None);
    assert_eq!(b.orphans(9).await.unwrap(), []);
    let late = b.take_over(orphan, OWNER).await.unwrap();
    assert_eq!(late, Takeover::Terminal(Status::Cancelled));
}

pub(super) async fn an_owner_that_asks_learns_what_it_has_lost(Pair { a, b, .. }: &Pair) {
    a.heartbeat(OWNER, "a", LEASE).await.unwrap();
    let keys = [(); 6].map(|()| new_key());
    let [mine, cancelled, deleted, released, foreground, ended] = keys;
    for key in keys {
        let new = if key == foreground {
            finished()
        } else {
            queued()
        };
        a.create(key, new).await.unwrap();
    }
    let _ = b.cancel(cancelled, cancelling()).await.unwrap();
    let _ = b.delete(deleted).await.unwrap();
    let _ = a.release(released, FENCE).await.unwrap();
    let _ = a
        .finalize(ended, FENCE, ending(Status::Failed))
        .await
        .unwrap();
    let running = keys.map(|key| (key, FENCE)).to_vec();
    let lost = a.check_ownership(running).await.unwrap();
    let expected = [
        (cancelled, OwnershipLoss::Terminal(Status::Cancelled)),
        (deleted, OwnershipLoss::Gone),
        (released, OwnershipLoss::Fenced),
        (foreground, OwnershipLoss::Terminal(Status::Completed)),
        (ended, OwnershipLoss::Terminal(Status::Failed)),
    ];
    assert_eq!(lost, expected);
    assert_eq!(a.check_ownership(vec![(mine, FENCE)]).await.unwrap(), []);
}

pub(super) async fn orphans_of_one_tenant_at_its_limit_do_not_hide_the_others_from_a_scan(
    Pair { a, b, .. }: &Pair,
) {
    /// Fewer than there are of that tenant.
    const MAX: usize = 2;
    /// Each finds each orphan with a chance of an eighth, about.
    const SCANS: usize = 1_000;
    for owner in [OWNER, OTHER] {
        a.heartbeat(owner, "a", LEASE).await.unwrap();
    }
    let mut all = BTreeSet::new();
    for _ in 0..8 {
        let key = new_key();
        a.create(key, queued()).await.unwrap();
        all.insert(key);
    }
    let of_another = |owner| {
        let key = ResponseKey {
            tenant: Tenant::tagged(0xdef),
            ..new_key()
        };
        let begin = InitialState::Background {
            fence: FencingToken::first(owner),
            retention: Retention::Stored,
            streams: true,
            request: Bytes::from_static(b"{}"),
        };
        (key, record(begin))
    };
    for owner in [OWNER, OTHER] {
        let (key, record) = of_another(owner);
        a.create(key, record).await.unwrap();
        all.insert(key);
    }
    for owner in [OWNER, OTHER] {
        a.end_lease(owner).await.unwrap();
    }
    let mut found = BTreeSet::new();
    for _ in 0..SCANS {
        let orphans = b.orphans(MAX).await.unwrap();
        assert!(orphans.len() <= MAX, "{orphans:?}");
        found.extend(orphans.iter().map(|orphan| orphan.key));
        if found == all {
            return;
        }
    }
    panic!("found {} of {}", found.len(), all.len());
}
