use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::ids::Block;
use crate::kv::predicted::{Metrics, Recorded, Settings};
use crate::kv::text_block;
use crate::observe;
use crate::observe::metrics::Registry;

const TOKENS: u32 = 10;
const WORKER: WorkerId = WorkerId(1);

fn prompt(locals: &[u64]) -> Vec<Block> {
    text_block::chain(
        text_block::chain_root("m", None),
        locals.iter().map(|local| (*local, TOKENS)),
    )
}

/// A replica with a clock.
struct Replica {
    index: PredictedIndex,
    now: Instant,
}

/// What one replica announces to the others of a routed prompt.
#[derive(Clone, Debug)]
struct Message {
    worker: WorkerId,
    parent: Option<BlockHash>,
    paths: Vec<u64>,
}

impl Replica {
    fn new(capacity: u64) -> Self {
        let settings = Settings {
            tokens_per_worker: capacity * u64::from(TOKENS),
            ..Settings::default()
        };
        let now = observe::now();
        let index = PredictedIndex::new(settings, Metrics::new(&Registry::default()), now);
        Self { index, now }
    }

    fn route(&self, worker: WorkerId, prompt: &[Block]) -> Option<Message> {
        let Recorded { news, .. } = self.index.record(self.now, worker, 0, prompt);
        let news = news?;
        Some(Message {
            worker,
            parent: news.start.checked_sub(1).map(|before| prompt[before].path),
            paths: prompt[news].iter().map(|block| block.path.0).collect(),
        })
    }

    fn apply(&self, message: &Message) -> Placed {
        let routed = RoutedBlocks {
            parent: message.parent,
            paths: &message.paths,
            tokens: &vec![TOKENS; message.paths.len()],
        };
        self.index
            .apply_routed(self.now, message.worker, 0, &routed)
    }

    fn depth(&self, locals: &[u64]) -> u32 {
        self.index.depth(WORKER, &prompt(locals))
    }

    /// Panics if a worker owns a block without those before it.
    fn check(&self) {
        for first in 0..3 {
            for second in 0..3 {
                for third in 0..3 {
                    let blocks = prompt(&[first, second, third, first, second]);
                    for worker in 0..3 {
                        let owns =
                            |block: &Block| self.index.slot(WorkerId(worker), block.path).is_some();
                        let depth = blocks.partition_point(owns);
                        assert!(!blocks[depth..].iter().any(owns));
                    }
                }
            }
        }
    }
}

#[test]
fn a_prompt_that_a_replica_routed_counts_at_the_others() {
    let (one, other) = (Replica::new(100), Replica::new(100));
    let first = one.route(WORKER, &prompt(&[1, 2, 3])).unwrap();
    assert_eq!((first.parent, first.paths.len()), (None, 3));
    assert_eq!(other.apply(&first).new, 3);
    assert_eq!(other.depth(&[1, 2, 3, 4]), 3);
    // The next turn goes through the other replica, which announces its new part only.
    let mut later = Replica {
        now: other.now + Duration::from_secs(5),
        ..other
    };
    let second = later.route(WORKER, &prompt(&[1, 2, 3, 4])).unwrap();
    // Both replicas start in second 0, in which nothing counts as shared; so the whole path is sent once more.
    assert_eq!((second.parent, second.paths.len()), (None, 4));
    one.apply(&second);
    later.now += Duration::from_secs(1);
    let third = later.route(WORKER, &prompt(&[1, 2, 3, 4, 5])).unwrap();
    assert_eq!(third.parent, Some(prompt(&[1, 2, 3, 4])[3].path));
    assert_eq!(third.paths.len(), 1);
    assert_eq!(one.apply(&third).new, 1);
    assert_eq!(one.depth(&[1, 2, 3, 4, 5]), 5);
}

#[test]
fn blocks_without_the_one_before_them_are_not_placed_until_their_path_is_sent_whole() {
    let (mut one, mut other) = (Replica::new(100), Replica::new(100));
    one.now += Duration::from_secs(5);
    let lost = one.route(WORKER, &prompt(&[1, 2])).unwrap();
    assert_eq!(lost.paths.len(), 2);
    one.now += Duration::from_secs(1);
    let message = one.route(WORKER, &prompt(&[1, 2, 3])).unwrap();
    let placed = other.apply(&message);
    assert_eq!((placed.new, placed.without_parent), (0, 1));
    assert_eq!(other.depth(&[1]), 0);
    // The sender learns that something was lost.
    one.index.resend_paths(one.now);
    one.now += Duration::from_secs(1);
    let whole = one.route(WORKER, &prompt(&[1, 2, 3, 4])).unwrap();
    assert_eq!((whole.parent, whole.paths.len()), (None, 4));
    other.now = one.now;
    assert_eq!(other.apply(&whole).new, 4);
    // And it is whole once only.
    let next = one.route(WORKER, &prompt(&[1, 2, 3, 4, 5])).unwrap();
    assert_eq!(next.paths.len(), 1);
}

#[test]
fn after_ten_minutes_a_path_is_sent_whole_again() {
    let mut one = Replica::new(100);
    one.now += Duration::from_secs(5);
    one.route(WORKER, &prompt(&[1]));
    let mut blocks_after = |seconds| {
        one.now += Duration::from_secs(seconds);
        let message = one.route(WORKER, &prompt(&[1, 2]));
        one.index.retract(WORKER, &prompt(&[1, 2]), 1);
        message.unwrap().paths.len()
    };
    assert_eq!(blocks_after(600), 1);
    assert_eq!(blocks_after(1), 2);
    assert_eq!(blocks_after(1), 1);
}

#[test]
fn a_worker_s_restart_that_the_replicas_notice_at_different_times_is_healed() {
    let (mut one, mut other) = (Replica::new(100), Replica::new(100));
    one.now += Duration::from_secs(5);
    other.now = one.now;
    one.index.forget(one.now, WORKER);
    let message = one.route(WORKER, &prompt(&[1, 2])).unwrap();
    other.apply(&message);
    // The other one notices the restart late and loses what was routed after it.
    other.index.forget(other.now, WORKER);
    one.now += Duration::from_secs(20);
    let message = one.route(WORKER, &prompt(&[1, 2, 3])).unwrap();
    assert_eq!(other.apply(&message).without_parent, 1);
    one.now += Duration::from_secs(20);
    let message = one.route(WORKER, &prompt(&[1, 2, 3, 4])).unwrap();
    assert_eq!(other.apply(&message).new, 4);
}

#[test]
fn a_prompt_that_a_worker_did_not_accept_is_taken_back_everywhere() {
    let (one, other) = (Replica::new(100), Replica::new(100));
    let whole = prompt(&[1, 2, 3, 4]);
    one.apply(&other.route(WORKER, &whole[..2]).unwrap());
    one.apply(&other.route(WORKER, &whole).unwrap());
    assert_eq!(one.depth(&[1, 2, 3, 4]), 4);
    one.index.retract_routed(WORKER, whole[3].path, 2);
    assert_eq!(one.depth(&[1, 2, 3, 4]), 2);
    // Twice, or of an unknown path, changes nothing.
    one.index.retract_routed(WORKER, whole[3].path, 2);
    assert_eq!(one.depth(&[1, 2, 3, 4]), 2);
    one.index.retract_routed(WorkerId(9), whole[1].path, 2);
    assert_eq!(one.depth(&[1, 2, 3, 4]), 2);
}

#[test]
fn what_no_engine_has_room_for_is_not_placed() {
    let replica = Replica::new(3);
    let paths: Vec<u64> = prompt(&[1, 2, 3, 4, 5])
        .iter()
        .map(|block| block.path.0)
        .collect();
    let message = Message {
        worker: WORKER,
        parent: None,
        paths,
    };
    assert_eq!(replica.apply(&message).new, 3);
    // A message whose lists differ in length is as long as the shorter one.
    let routed = RoutedBlocks {
        parent: None,
        paths: &message.paths,
        tokens: &[TOKENS],
    };
    assert_eq!(
        replica
            .index
            .apply_routed(replica.now, WorkerId(2), 0, &routed)
            .new,
        1
    );
}

#[derive(Clone, Debug)]
enum Step {
    Route {
        replica: usize,
        worker: u32,
        prompt: Vec<u64>,
        is_lost: bool,
        is_refused: bool,
    },
    Forget {
        replica: usize,
        worker: u32,
    },
    Expire {
        replica: usize,
        worker: u32,
    },
    Wait {
        seconds: u64,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let prompt = || proptest::collection::vec(0u64..3, 1..6);
    let step = prop_oneof![
        12 => (0usize..3, 0u32..3, prompt(), 0u32..6, 0u32..6).prop_map(|(replica, worker, prompt, lost, refused)| {
            Step::Route { replica, worker, prompt, is_lost: lost == 0, is_refused: refused == 0 }
        }),
        1 => (0usize..3, 0u32..3).prop_map(|(replica, worker)| Step::Forget { replica, worker }),
        1 => (0usize..3, 0u32..3).prop_map(|(replica, worker)| Step::Expire { replica, worker }),
        3 => (0u64..40).prop_map(|seconds| Step::Wait { seconds }),
    ];
    proptest::collection::vec(step, 0..60)
}

proptest! {
    /// Whatever is lost, refused, forgotten and evicted: a worker that owns a block owns all blocks before it. And once
    /// every replica has room and messages arrive, all of them know what one of them routes.
    #[test]
    fn replicas_keep_the_rule_and_heal(steps in steps(), capacity in 2u64..30) {
        let mut replicas = [0, 1, 2].map(|_| Replica::new(capacity));
        for step in steps {
            match step {
                Step::Route { replica, worker, prompt: locals, is_lost, is_refused } => {
                    let worker = WorkerId(worker);
                    let blocks = prompt(&locals);
                    let message = replicas[replica].route(worker, &blocks);
                    let others = || (0..3).filter(|other| *other != replica);
                    if let Some(message) = &message {
                        if is_lost {
                            replicas[replica].index.resend_paths(replicas[replica].now);
                        } else {
                            others().for_each(|other| { replicas[other].apply(message); });
                        }
                        if is_refused && let Some(end) = message.paths.last() {
                            let from = blocks.len().min(message.paths.len());
                            replicas[replica].index.retract(worker, &blocks, blocks.len() - from);
                            others().for_each(|other| {
                                replicas[other].index.retract_routed(worker, BlockHash(*end), from);
                            });
                        }
                    }
                }
                Step::Forget { replica, worker } => replicas[replica].index.forget(replicas[replica].now, WorkerId(worker)),
                Step::Expire { replica, worker } => {
                    replicas[replica].index.remove_expired(replicas[replica].now, |id| id != WorkerId(worker));
                }
                Step::Wait { seconds } => {
                    replicas.iter_mut().for_each(|replica| replica.now += Duration::from_secs(seconds));
                }
            }
            replicas.iter().for_each(Replica::check);
        }
        // At the latest after ten minutes a path is sent whole.
        for replica in &mut replicas {
            replica.now += Duration::from_secs(601);
        }
        let blocks = prompt(&[0, 1]);
        let message = replicas[0].route(WORKER, &blocks).unwrap();
        for other in &replicas[1..] {
            other.apply(&message);
        }
        for replica in &replicas {
            prop_assert_eq!(replica.depth(&[0, 1]), 2);
        }
    }
}
