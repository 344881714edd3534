use proptest::prelude::*;

use super::*;
use crate::kv::block;
use crate::observe;
use crate::observe::metrics::Registry;

const A: WorkerId = WorkerId(1);
const B: WorkerId = WorkerId(2);

fn unconfirmed(max_blocks: u64) -> (Arc<UnconfirmedBlocks>, Instant) {
    let now = observe::now();
    let settings = Settings {
        grace_period: Duration::from_millis(1_000),
        event_delay: Duration::from_millis(250),
        peer_lifetime: Duration::from_secs(10),
        max_blocks,
    };
    let metrics = Metrics::new(&Registry::default());
    (UnconfirmedBlocks::new(settings, metrics), now)
}

/// A prompt with one letter for each block.
fn prompt(letters: &str) -> PrefixKeys {
    let locals = letters
        .bytes()
        .map(|letter| block::hash_block(&[letter.into()]));
    prefix_keys(block::chain_root(None, None), &locals.collect::<Vec<_>>())
}

fn is_empty(blocks: &UnconfirmedBlocks) -> bool {
    blocks.count.load(Relaxed) == 0 && blocks.prefixes.is_empty() && blocks.ending.is_empty()
}

/// How many of a prompt's first blocks one worker will have cached.
fn depth(blocks: &UnconfirmedBlocks, worker: WorkerId, keys: &[PrefixKey]) -> u32 {
    let found = blocks.overlap(keys, 8, 0);
    let owner = found.iter().find(|owner| owner.worker == worker);
    owner.map_or(0, |owner| owner.blocks)
}

fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

#[test]
fn a_prompt_counts_until_the_grace_period_after_its_first_token_ends() {
    let (blocks, now) = unconfirmed(100);
    let prompt_sent = blocks.insert(A, &prompt("system one"));
    let other = prompt("system two");
    let depth_at = |at| {
        blocks.remove_ended(at, |_| None);
        depth(&blocks, A, &other)
    };
    assert_eq!(depth_at(now), 7);
    assert_eq!(depth(&blocks, B, &other), 0);
    // However long computing it takes.
    assert_eq!(depth_at(now + seconds(500)), 7);
    prompt_sent.on_first_token(now + seconds(500));
    assert_eq!(depth_at(now + seconds(500)), 7);
    assert_eq!(depth_at(now + seconds(501)), 0);
    assert!(is_empty(&blocks));
}

#[test]
fn the_ranks_of_a_worker_are_forgotten_with_it() {
    let (blocks, now) = unconfirmed(100);
    let rank = A.at_rank(3).unwrap();
    blocks.insert(rank, &prompt("abc")).on_first_token(now);
    assert_eq!(
        [rank, A].map(|owner| depth(&blocks, owner, &prompt("abc"))),
        [3, 0]
    );
    blocks.forget(B);
    assert_eq!(depth(&blocks, rank, &prompt("abc")), 3);
    blocks.forget(A);
    assert!(is_empty(&blocks));
}

#[test]
fn what_events_after_the_first_token_do_not_report_does_not_count_any_more() {
    let (blocks, now) = unconfirmed(100);
    let at = |millis| now + Duration::from_millis(millis);
    let sent = blocks.insert(A, &prompt("abc"));
    let count = |millis, applied: Option<u64>| {
        blocks.remove_ended(at(millis), |worker| {
            assert_eq!(worker, A);
            applied.map(at)
        });
        depth(&blocks, A, &prompt("abc"))
    };
    // However far the events are, the prompt is not computed yet.
    assert_eq!(count(600, Some(600)), 3);
    sent.on_first_token(at(1_000));
    assert_eq!(count(1_300, None), 3);
    // It may have been published before the prompt's own.
    assert_eq!(count(1_300, Some(1_249)), 3);
    assert_eq!(count(1_300, Some(1_250)), 0);
    assert_eq!(count(1_300, Some(1_300)), 0);
    // The next request with this prefix computes it again.
    let again = blocks.insert(A, &prompt("ab"));
    assert_eq!(count(1_400, Some(1_300)), 2);
    again.on_first_token(at(1_500));
    assert_eq!(count(1_600, Some(1_300)), 2);
    assert_eq!(count(1_800, Some(1_800)), 0);
}

#[test]
fn what_another_replica_routed_counts_whatever_was_reported() {
    let (blocks, now) = unconfirmed(100);
    let paths: Vec<u64> = prompt("abc").iter().map(|key| key.path.0).collect();
    blocks.insert_routed(now, A, &paths);
    let later = now + seconds(5);
    blocks.remove_ended(later, |_| Some(later));
    assert_eq!(depth(&blocks, A, &prompt("abc")), 3);
}

#[test]
fn a_request_that_its_worker_did_not_accept_leaves_nothing_behind() {
    let (blocks, _) = unconfirmed(100);
    let first = blocks.insert(A, &prompt("abc"));
    let second = blocks.insert(A, &prompt("abd"));
    drop(first);
    assert_eq!(depth(&blocks, A, &prompt("abc")), 2);
    drop(second);
    assert!(is_empty(&blocks));
}

#[test]
fn a_prompt_that_another_replica_routed_counts_for_a_while() {
    let (blocks, now) = unconfirmed(100);
    let paths: Vec<u64> = prompt("system one").iter().map(|key| key.path.0).collect();
    blocks.insert_routed(now, A, &paths);
    let other = prompt("system two");
    let depth_at = |at| {
        blocks.remove_ended(at, |_| None);
        depth(&blocks, A, &other)
    };
    assert_eq!(depth_at(now), 7);
    assert_eq!(depth_at(now + seconds(9)), 7);
    blocks.insert_routed(now + seconds(9), A, &paths);
    assert_eq!(depth_at(now + seconds(10)), 7);
    // An own request that was not accepted leaves what another replica's counts for.
    drop(blocks.insert(A, &other));
    assert_eq!(depth_at(now + seconds(18)), 7);
    assert_eq!(depth_at(now + seconds(19)), 0);
    assert!(is_empty(&blocks));
    blocks.insert_routed(now, A, &paths);
    blocks.forget(A);
    assert!(is_empty(&blocks));
}

#[test]
fn what_other_replicas_routed_finds_no_more_room_than_own_prompts() {
    let (blocks, now) = unconfirmed(4);
    let paths: Vec<u64> = prompt("abcdef").iter().map(|key| key.path.0).collect();
    blocks.insert_routed(now, A, &paths);
    assert_eq!(depth(&blocks, A, &prompt("abcdef")), 4);
    assert_eq!(blocks.metrics.rejected.get(), 2);
}

#[test]
fn the_longest_prefixes_come_first() {
    let (blocks, _) = unconfirmed(100);
    let _requests = [
        blocks.insert(A, &prompt("ab")),
        blocks.insert(B, &prompt("abcd")),
        blocks.insert(A, &prompt("x")),
    ];
    let found = |limit| {
        let found = blocks.overlap(&prompt("abcdef"), limit, 0);
        found
            .iter()
            .map(|prefix| (prefix.worker, prefix.blocks))
            .collect::<Vec<_>>()
    };
    assert_eq!(found(8), [(B, 4), (A, 2)]);
    assert_eq!(found(1), [(B, 4)]);
    assert_eq!(found(0), []);
}

#[test]
fn of_more_workers_with_the_same_prefix_than_are_asked_for_the_seed_picks() {
    let (blocks, _) = unconfirmed(100);
    let _requests = [A, B].map(|worker| blocks.insert(worker, &prompt("ab")));
    let found = |seed| blocks.overlap(&prompt("abc"), 1, seed)[0].worker;
    assert_ne!(found(0), found(1));
    assert_eq!(found(0), found(2));
}

#[test]
fn a_restarted_worker_has_computed_nothing() {
    let (blocks, now) = unconfirmed(100);
    blocks.insert(A, &prompt("ab")).on_first_token(now);
    let running = blocks.insert(A, &prompt("xy"));
    blocks.forget(A);
    assert_eq!(depth(&blocks, A, &prompt("ab")), 0);
    assert_eq!(depth(&blocks, A, &prompt("xy")), 2);
    drop(running);
    assert!(is_empty(&blocks));
}

#[test]
fn at_the_limit_the_end_of_a_prompt_is_rejected() {
    let (blocks, _) = unconfirmed(3);
    let prompt_sent = blocks.insert(A, &prompt("abcde"));
    assert_eq!(depth(&blocks, A, &prompt("abcde")), 3);
    assert_eq!(blocks.metrics.rejected.get(), 2);
    drop(prompt_sent);
    assert!(is_empty(&blocks));
}

#[test]
fn long_prompts_have_few_keys_and_their_common_prefix_is_known_to_an_eighth() {
    let of = |blocks: u32| {
        let locals = (0..blocks).map(|block| block::hash_block(&[block]));
        prefix_keys(block::chain_root(None, None), &locals.collect::<Vec<_>>())
    };
    assert_eq!([15, 64].map(|blocks| of(blocks).len()), [15, 32]);
    assert!((80..90).contains(&of(8_000).len()));
    for blocks in [64, 100, 1_000, 5_555] {
        let known = of(blocks).last().unwrap().blocks;
        assert!(known * 9 > blocks * 8, "{known} of {blocks}");
    }
}

#[derive(Clone, Debug)]
enum Step {
    Expect(u32, Vec<u8>),
    Computed(usize),
    Failed(usize),
    Wait(u64),
    Forget(u32),
}

fn letters() -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(b'a'..b'c', 0..6)
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0u32..3, letters()).prop_map(|(worker, prompt)| Step::Expect(worker, prompt)),
        2 => (0usize..8).prop_map(Step::Computed),
        1 => (0usize..8).prop_map(Step::Failed),
        2 => (0u64..700).prop_map(Step::Wait),
        1 => (0u32..3).prop_map(Step::Forget),
    ]
}

/// The plainest model: a list of prompts, each with its worker and the time until which it counts.
#[derive(Default)]
struct PlainList {
    running: Vec<(u32, Vec<u8>)>,
    computed: Vec<(u32, Vec<u8>, u64)>,
}

impl PlainList {
    fn depth(&self, now_ms: u64, worker: u32, prompt: &[u8]) -> usize {
        let lately = self.computed.iter().filter(|request| now_ms < request.2);
        let all = self.running.iter().map(|request| (request.0, &request.1));
        all.chain(lately.map(|request| (request.0, &request.1)))
            .filter(|request| request.0 == worker)
            .map(|request| {
                std::iter::zip(request.1, prompt)
                    .take_while(|(a, b)| a == b)
                    .count()
            })
            .max()
            .unwrap_or(0)
    }
}

proptest! {
    #[test]
    fn it_equals_a_plain_list_of_prompts(steps in proptest::collection::vec(step(), 0..60), asked in letters()) {
        let (blocks, created) = unconfirmed(10_000);
        let text = |letters: &[u8]| prompt(std::str::from_utf8(letters).unwrap());
        let mut now_ms = 0;
        let mut plain = PlainList::default();
        let mut requests = Vec::new();
        for step in steps {
            let now = created + Duration::from_millis(now_ms);
            match step {
                Step::Expect(worker, letters) => {
                    requests.push(blocks.insert(WorkerId(worker), &text(&letters)));
                    plain.running.push((worker, letters));
                }
                Step::Computed(place) if place < requests.len() => {
                    requests.remove(place).on_first_token(now);
                    let (worker, letters) = plain.running.remove(place);
                    plain.computed.push((worker, letters, now_ms + 1_000));
                }
                Step::Failed(place) if place < requests.len() => {
                    drop(requests.remove(place));
                    plain.running.remove(place);
                }
                Step::Computed(_) | Step::Failed(_) => {}
                Step::Wait(ms) => now_ms += ms,
                Step::Forget(worker) => {
                    blocks.forget(WorkerId(worker));
                    plain.computed.retain(|request| request.0 != worker);
                }
            }
            let now = created + Duration::from_millis(now_ms);
            blocks.remove_ended(now, |_| None);
            let overlap = blocks.overlap(&text(&asked), 8, 0);
            for worker in 0..3 {
                let depth = plain.depth(now_ms, worker, &asked);
                let found = overlap.iter().find(|prefix| prefix.worker == WorkerId(worker));
                prop_assert_eq!(found.map_or(0, |prefix| prefix.blocks as usize), depth);
            }
            prop_assert!(overlap.is_sorted_by(|a, b| a.blocks >= b.blocks));
        }
        drop(requests);
        blocks.remove_ended(created + Duration::from_millis(now_ms + 1_000), |_| None);
        prop_assert!(is_empty(&blocks));
    }
}
