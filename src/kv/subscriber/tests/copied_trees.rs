//! Trees of other replicas, as a subscriber asks for them, takes them over and gives its own.

use super::*;
use crate::kv::page_hash;
use crate::kv::stream::PeerTreeRefusal;
use crate::kv::tree_copies::{TreeCopy, TreeOutcome, WantedTree};

/// Other replicas, whose answers the test hands on itself.
#[derive(Debug, Default)]
struct Replicas {
    /// What was refused before each request.
    requests: Mutex<Vec<Vec<Arc<str>>>>,
    outcomes: Mutex<Vec<TreeOutcome>>,
}

impl TreeSource for Replicas {
    fn fetch(
        &self,
        wanted: WantedTree,
    ) -> Pin<Box<dyn Future<Output = Option<FetchedTree>> + Send>> {
        self.requests.lock().push(wanted.refused);
        Box::pin(std::future::pending())
    }

    fn report(&self, outcome: TreeOutcome) {
        self.outcomes.lock().push(outcome);
    }

    fn timeout(&self) -> Duration {
        Duration::from_secs(10)
    }
}

/// One rank's subscriber, which does what the test hands it.
struct Follower {
    task: Task,
    source: Script,
    replicas: Arc<Replicas>,
    now: Instant,
}

impl Follower {
    fn new(subject: Subject, can_replay: bool) -> Self {
        let registry = Registry::default();
        let indexes = PrefixIndexes::new(indexes::Settings::default(), &registry);
        let replicas: Arc<Replicas> = Arc::default();
        let trees: Arc<dyn TreeSource> = replicas.clone();
        let shared = Shared {
            trees: Some(trees),
            ..shared(indexes, &registry)
        };
        let (_, said) = mpsc::unbounded_channel();
        let (repeat_reports, _) = mpsc::unbounded_channel();
        let now = observe::now();
        Self {
            task: Task::new(now, subject, shared),
            source: Script {
                said,
                repeat_reports,
                can_replay,
            },
            replicas,
            now,
        }
    }

    async fn hear(&mut self, events: impl IntoIterator<Item = SourceEvent>) {
        for event in events {
            let input = Input::Source(event);
            self.task.handle(self.now, input, &mut self.source).await;
        }
    }

    /// The engine replays these batches to a new connection.
    async fn join(&mut self, batches: impl IntoIterator<Item = SourceBatch>) {
        self.hear([connected()]).await;
        self.hear(batches.into_iter().map(SourceEvent::Replayed))
            .await;
        self.hear([SourceEvent::ReplayEnd]).await;
    }

    /// Another replica's answer arrives.
    async fn receive(&mut self, source: &str, copy: &TreeCopy) {
        let tree = FetchedTree {
            peer: "other".into(),
            source: source.into(),
            copy: copy.clone(),
        };
        let input = Input::PeerTree(Some(Box::new(tree)));
        self.task.handle(self.now, input, &mut self.source).await;
    }

    fn requests(&self) -> usize {
        self.replicas.requests.lock().len()
    }

    fn refusals(&self) -> Vec<PeerTreeRefusal> {
        let refusal = |outcome: &TreeOutcome| match outcome {
            TreeOutcome::Refused(reason) => Some(*reason),
            TreeOutcome::Taken { .. } | TreeOutcome::NotConfirmed => None,
        };
        let outcomes = self.replicas.outcomes.lock();
        outcomes.iter().filter_map(refusal).collect()
    }
}

fn play(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    runtime.block_on(test);
}

/// A whole history: three batches.
fn history() -> [SourceBatch; 3] {
    [
        frame(0, vec![stored(0, 2)]),
        frame(1, vec![stored(2, 3)]),
        frame(2, vec![stored(3, 4)]),
    ]
}

/// What a replica gives that has followed the engine from its first batch on.
async fn whole_copy() -> TreeCopy {
    let mut giver = Follower::new(subject(), true);
    giver.join(history()).await;
    assert_eq!(giver.task.state, State::Live);
    giver.task.copy_tree().await.unwrap()
}

#[test]
fn a_tree_that_comes_while_the_connection_is_lost_is_asked_for_once_more_and_not_of_each_replica() {
    play(async {
        let copy = whole_copy().await;
        let [_, _, last] = history();
        let mut late = Follower::new(subject(), true);
        late.join([last.clone()]).await;
        assert_eq!((late.task.state, late.requests()), (State::Partial, 1));
        late.hear([lost()]).await;
        late.receive("a:9", &copy).await;
        assert_eq!(late.refusals(), [PeerTreeRefusal::Disconnected]);
        assert_eq!(late.requests(), 1, "no other replica's would be taken");
        late.join([last.clone()]).await;
        assert_eq!(late.requests(), 2);
        let refused = late.replicas.requests.lock()[1].clone();
        assert!(refused.is_empty(), "the same replica may give it now");
        late.receive("a:9", &copy).await;
        late.hear([SourceEvent::Replayed(last), SourceEvent::ReplayEnd])
            .await;
        assert_eq!(late.task.state, State::Live);
        assert_eq!(late.task.tree.tree().map(|(_, tree)| tree.len()), Some(4));
    });
}

#[test]
fn a_tree_that_no_replica_can_give_any_more_is_asked_for_once_not_of_each_replica() {
    play(async {
        let copy = whole_copy().await;
        // All is known by the time that it comes.
        let mut late = Follower::new(subject(), true);
        late.join(history().into_iter().skip(2)).await;
        assert_eq!(late.requests(), 1);
        let cleared = Event::Cleared { ownership: None };
        late.hear([SourceEvent::Live(frame(3, vec![cleared]))])
            .await;
        assert_eq!(late.task.state, State::Live);
        late.receive("a:9", &copy).await;
        assert_eq!(late.refusals(), [PeerTreeRefusal::NotNeeded]);
        assert_eq!(late.requests(), 1);
        // The engine cannot be asked whether it is its tree, and what waited for it waits no longer.
        let mut late = Follower::new(subject(), false);
        let [_, _, last] = history();
        late.hear([connected(), SourceEvent::Live(last)]).await;
        assert_eq!((late.task.state, late.requests()), (State::Cold, 1));
        late.now += Duration::from_secs(10);
        late.task
            .handle(late.now, Input::Timer, &mut late.source)
            .await;
        assert_eq!(late.task.state, State::Partial);
        late.receive("a:9", &copy).await;
        assert_eq!(late.refusals(), [PeerTreeRefusal::Unconfirmed]);
        assert_eq!(late.requests(), 1);
    });
}

/// Another process's tree says nothing of what the next replica has.
#[test]
fn a_tree_of_another_process_is_asked_of_the_next_replica() {
    play(async {
        let mut copy = whole_copy().await;
        copy.position.digest += 1;
        let mut late = Follower::new(subject(), true);
        late.join(history().into_iter().skip(2)).await;
        late.receive("a:9", &copy).await;
        assert_eq!(late.refusals(), [PeerTreeRefusal::OtherDigest]);
        let requests = late.replicas.requests.lock().clone();
        let expected: [Vec<Arc<str>>; 2] = [vec![], vec!["a:9".into()]];
        assert_eq!(requests, expected);
    });
}

#[test]
fn a_copy_whose_blocks_were_just_evicted_does_not_say_that_it_is_whole() {
    let registry = Registry::default();
    let indexes = PrefixIndexes::new(
        indexes::Settings {
            max_index_memory: 4 << 20,
        },
        &registry,
    );
    let (_say, said) = mpsc::unbounded_channel();
    let (repeat_reports, _asked) = mpsc::unbounded_channel();
    let mut source = Script {
        said,
        repeat_reports,
        can_replay: false,
    };
    let now = observe::now();
    let mut task = Task::new(now, subject(), shared(indexes.clone(), &registry));
    play(async {
        let first = SourceEvent::Live(frame(0, vec![stored(0, 20_000)]));
        for event in [connected(), first] {
            task.handle(now, Input::Source(event), &mut source).await;
        }
        let whole = task.copy_tree().await.unwrap();
        assert!(whole.position.is_complete);
        assert_eq!(whole.blocks.len(), 20_000);
        let mut other = indexes.index(&"m".into(), SIZE).add_tree(WorkerId(8), 0);
        for chain in 1..10_000_u64 {
            let new = |at| NewBlock {
                name: EngineHash(chain << 32 | at),
                local: block::LocalHash(chain << 32 | at),
            };
            let blocks: Vec<NewBlock> = (0..60).map(new).collect();
            let after = Parent::Root(block::chain_root(None, None));
            other
                .store(after, &blocks, Tier::Gpu, CopyReport::OneMore)
                .unwrap();
            if task.tree.tree().unwrap().1.len() < 20_000 {
                break;
            }
        }
        assert_eq!(task.state, State::Live, "nobody has looked yet");
        let copy = task.copy_tree().await.unwrap();
        assert!((1..20_000).contains(&copy.blocks.len()));
        assert_eq!(copy.blocks.orphans, 0, "a chain loses its end");
        assert!(!copy.position.is_complete);
        let again = task.copy_tree().await.unwrap();
        assert!(!again.position.is_complete, "nor does the next copy");
    });
}

/// A prompt's first 16 tokens in pages of `size`.
fn first_pages(tokens: std::ops::Range<u32>, size: u32, names: Vec<EngineHash>) -> Event {
    Event::Stored(Stored {
        hashes: names,
        token_ids: tokens.collect(),
        block_size: size,
        ..Stored::default()
    })
}

#[test]
fn pages_of_a_name_space_that_is_not_reported_are_ignored_after_another_replicas_tree_was_taken() {
    for size in [1, 16] {
        play(async {
            let tokens: Vec<u32> = (100..116).collect();
            let names = page_hash::page_hashes(&tokens, size as usize, None);
            let own = first_pages(100..116, size, names.collect());
            let mut giver = Follower::new(subject_of_pages(), true);
            giver
                .join([frame(0, vec![own]), frame(1, vec![]), frame(2, vec![])])
                .await;
            let copy = giver.task.copy_tree().await.unwrap();
            assert!(copy.has_matching_names);
            let mut late = Follower::new(subject_of_pages(), true);
            late.join([frame(2, vec![])]).await;
            late.receive("a:9", &copy).await;
            late.hear([
                SourceEvent::Replayed(frame(2, vec![])),
                SourceEvent::ReplayEnd,
            ])
            .await;
            assert_eq!(late.task.state, State::Live);
            // What it gives on says so, too.
            let given_on = late.task.copy_tree().await.unwrap();
            assert!(given_on.has_matching_names);
            let foreign = (7..7 + u64::from(16 / size)).map(EngineHash).collect();
            let batch = Batch {
                events: vec![first_pages(0..16, size, foreign)],
                ..Batch::default()
            };
            let mut effect = BatchEffect::default();
            late.task.tree.apply(&batch, &mut effect);
            assert_eq!(effect.ignored, [IgnoredReason::HashMismatch]);
            assert_eq!(late.task.tree.tree().map(|(_, tree)| tree.len()), Some(1));
        });
    }
}

/// A replica of an older release does not say whether names matched.
#[test]
fn names_that_matched_here_count_with_a_tree_that_the_own_batches_show_to_be_of_the_same_process() {
    play(async {
        let tokens: Vec<u32> = (100..116).collect();
        let names = page_hash::page_hashes(&tokens, 16, None);
        let own = first_pages(100..116, 16, names.collect());
        let history = [frame(0, vec![]), frame(1, vec![own]), frame(2, vec![])];
        let mut giver = Follower::new(subject_of_pages(), true);
        giver.join(history.clone()).await;
        let mut copy = giver.task.copy_tree().await.unwrap();
        copy.has_matching_names = false;
        // A batch that is known here, and one that is not yet.
        for (last, counts) in [(2, true), (3, false)] {
            let mut late = Follower::new(subject_of_pages(), true);
            late.join(history.iter().skip(1).cloned()).await;
            assert!(late.task.tree.has_matching_names());
            copy.position.sequence = last;
            copy.position.digest = u128::from(last);
            late.receive("a:9", &copy).await;
            assert!(late.refusals().is_empty());
            assert_eq!(late.task.tree.has_matching_names(), counts);
        }
    });
}

#[test]
fn a_process_whose_names_never_matched_is_given_on_as_such() {
    play(async {
        let mut giver = Follower::new(subject_of_pages(), true);
        let unlike = first_pages(0..16, 16, vec![EngineHash(7)]);
        giver.join([frame(0, vec![unlike])]).await;
        let copy = giver.task.copy_tree().await.unwrap();
        assert!(!copy.has_matching_names);
    });
}
