use std::time::Duration;

use prost::Message;

use super::*;
use crate::kv::{block, predicted, text_block, unconfirmed};
use crate::observe;

const WORKER: WorkerId = WorkerId(7);

/// A replica. Its workers have numbers 100 above their ids.
struct Replica {
    routed: RoutedPrompts,
    now: Instant,
}

impl Replica {
    fn new(max_queued: usize) -> Self {
        let (registry, now) = (Registry::default(), observe::now());
        let metrics = predicted::Metrics::new(&registry);
        let predicted = PredictedIndex::new(predicted::Settings::default(), metrics, now);
        let metrics = unconfirmed::Metrics::new(&registry);
        let unconfirmed = UnconfirmedBlocks::new(unconfirmed::Settings::default(), metrics);
        let routed = RoutedPrompts::new(max_queued, Arc::new(predicted), unconfirmed, &registry);
        routed.set_connected(true);
        Self { routed, now }
    }

    fn route(&self, prompt: &[Block]) -> usize {
        let recorded = self.routed.predicted.record(self.now, WORKER, 0, prompt);
        if let Some(news) = recorded.news {
            self.routed.push(self.now, WORKER, prompt, news);
        }
        recorded.cached_blocks
    }

    /// Through the wire.
    fn receive(&self, message: &wire::RoutedPrompts) {
        let bytes = message.encode_to_vec();
        let message = wire::RoutedPrompts::decode(&bytes[..]).unwrap();
        self.routed.apply(self.now, &message, |number| {
            Some(RoutedWorker {
                id: WorkerId(number.checked_sub(100)?),
                cache_tokens: 0,
            })
        });
    }

    fn message(&self) -> Option<wire::RoutedPrompts> {
        self.routed.take_message(|worker| Some(worker.0 + 100))
    }

    fn depth(&self, prompt: &[Block]) -> u32 {
        self.routed.predicted.depth(WORKER, prompt)
    }
}

fn prompt(locals: &[u64]) -> Vec<Block> {
    text_block::chain(
        text_block::chain_root("m", None),
        locals.iter().map(|local| (*local, 16)),
    )
}

#[test]
fn what_one_replica_routes_the_others_predict() {
    let (one, other) = (Replica::new(1_000), Replica::new(1_000));
    one.route(&prompt(&[1, 2, 3]));
    one.route(&prompt(&[1, 2, 4]));
    let message = one.message().unwrap();
    assert_eq!(message.prompts.len(), 2);
    assert_eq!(one.message(), None);
    other.receive(&message);
    assert_eq!(other.depth(&prompt(&[1, 2, 3])), 3);
    assert_eq!(other.depth(&prompt(&[1, 2, 4, 5])), 3);
    assert_eq!(other.routed.metrics.new.get(), 4);
    assert_eq!(other.routed.predicted.size(WORKER), (4, 64));
    // Twice changes nothing.
    other.receive(&message);
    assert_eq!(other.routed.predicted.size(WORKER), (4, 64));
}

#[test]
fn a_request_that_was_not_accepted_is_taken_back_at_the_others() {
    let (one, other) = (Replica::new(1_000), Replica::new(1_000));
    let whole = prompt(&[1, 2, 3]);
    one.route(&whole[..1]);
    let cached = one.route(&whole);
    other.receive(&one.message().unwrap());
    assert_eq!(other.depth(&whole), 3);
    one.routed.retract(one.now, WORKER, &whole, cached);
    other.receive(&one.message().unwrap());
    assert_eq!(other.depth(&whole), 1);
}

#[test]
fn prompts_whose_blocks_are_not_reported_yet_count_at_the_others() {
    let (one, other) = (Replica::new(1_000), Replica::new(1_000));
    let locals: Vec<_> = (0..40).map(|token| block::hash_block(&[token])).collect();
    let keys = unconfirmed::prefix_keys(block::chain_root(None, None), &locals);
    one.routed.push_unconfirmed(WORKER, &keys);
    other.receive(&one.message().unwrap());
    let found = other.routed.unconfirmed.overlap(&keys, 8, 0);
    assert_eq!((found[0].worker, found[0].blocks), (WORKER, 40));
    let later = other.now + Duration::from_secs(60);
    other.routed.unconfirmed.remove_ended(later, |_| None);
    assert!(other.routed.unconfirmed.overlap(&keys, 8, 0).is_empty());
}

#[test]
fn nothing_is_queued_while_no_replica_is_connected() {
    let one = Replica::new(1_000);
    one.route(&prompt(&[1]));
    one.routed.set_connected(false);
    assert_eq!(one.message(), None);
    one.route(&prompt(&[2]));
    assert_eq!(one.message(), None);
}

#[test]
fn what_finds_no_room_is_dropped_counted_and_repeated_with_its_next_use() {
    let (mut one, other) = (Replica::new(8 * 8), Replica::new(1_000));
    one.now += Duration::from_secs(5);
    one.route(&prompt(&[1, 2, 3, 4]));
    one.route(&prompt(&[5, 6, 7]));
    assert_eq!(one.routed.metrics.dropped.get(), 3);
    other.receive(&one.message().unwrap());
    assert_eq!(other.depth(&prompt(&[5, 6, 7])), 0);
    one.now += Duration::from_secs(1);
    one.route(&prompt(&[5, 6, 7, 8]));
    other.receive(&one.message().unwrap());
    assert_eq!(other.depth(&prompt(&[5, 6, 7, 8])), 4);
}

#[test]
fn unknown_workers_and_blocks_that_cannot_be_placed_are_counted() {
    let other = Replica::new(1_000);
    let prompt = |number, parent, blocks: &[u64]| wire::RoutedPrompt {
        number,
        parent,
        blocks: blocks.to_vec(),
        tokens: vec![16; blocks.len()],
        retracted: 0,
    };
    other.receive(&wire::RoutedPrompts {
        prompts: vec![prompt(3, None, &[1, 2]), prompt(107, Some(9), &[10])],
        unconfirmed: vec![wire::UnconfirmedPrompt {
            number: 4,
            prefixes: vec![1],
        }],
    });
    let metrics = &other.routed.metrics;
    assert_eq!(metrics.unknown_worker.get(), 3);
    assert_eq!(metrics.without_parent.get(), 1);
    assert_eq!(other.routed.predicted.size(WORKER), (0, 0));
}
