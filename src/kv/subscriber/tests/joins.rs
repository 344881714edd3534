//! Many ranks that join at once.

use std::collections::BTreeSet;

use tokio::task::JoinSet;

use super::*;
use crate::kv::subscriber::joins::Settings;

/// One rank's source, as the test drives it.
struct Rank {
    say: mpsc::UnboundedSender<SourceEvent>,
    asked: mpsc::UnboundedReceiver<u64>,
}

struct Ranks {
    ranks: Vec<Rank>,
    board: Arc<StatusBoard>,
    indexes: Arc<PrefixIndexes>,
    registry: Registry,
    _running: JoinSet<()>,
}

impl Ranks {
    fn start(count: u32, settings: &Settings) -> Self {
        Self::start_with(count, settings, stream::Settings::default())
    }

    fn start_with(count: u32, settings: &Settings, stream_settings: stream::Settings) -> Self {
        let registry = Registry::default();
        let indexes = PrefixIndexes::new(indexes::Settings::default(), &registry);
        let shared = Shared {
            joins: Joins::new(settings, &registry),
            settings: stream_settings,
            ..shared(indexes.clone(), &Registry::default())
        };
        let mut running = JoinSet::new();
        let ranks = (0..count).map(|number| {
            let (say, said) = mpsc::unbounded_channel();
            let (ask, asked) = mpsc::unbounded_channel();
            let source = Script {
                said,
                repeat_reports: ask,
                can_replay: true,
            };
            let subject = Subject {
                worker: WorkerId(number),
                name: format!("http://a:{number}").into(),
                ..subject()
            };
            let (_, restarts) = watch::channel(0);
            running.spawn(run(source, subject, shared.clone(), restarts));
            Rank { say, asked }
        });
        Self {
            ranks: ranks.collect(),
            board: shared.board.clone(),
            indexes,
            registry,
            _running: running,
        }
    }

    async fn say(&self, rank: usize, said: impl IntoIterator<Item = SourceEvent>) {
        for said in said {
            self.ranks[rank].say.send(said).unwrap();
        }
        settle().await;
    }

    /// The ranks that asked for a replay since the last call, and from where on.
    fn asked(&mut self) -> Vec<(usize, u64)> {
        let ranks = self.ranks.iter_mut().enumerate();
        ranks
            .filter_map(|(number, rank)| Some((number, rank.asked.try_recv().ok()?)))
            .collect()
    }

    fn value(&self, name: &str) -> u64 {
        let text = self.registry.text();
        let line = text.lines().find(|line| line.starts_with(name)).unwrap();
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }

    /// How many blocks of the prompt each worker has, as routing sees it.
    fn depths(&self, blocks: u32) -> Vec<u32> {
        let mut locals = Vec::new();
        block::hash_blocks(&prompt(blocks), SIZE, &mut locals);
        let mut found = Vec::new();
        for (_, index) in self.indexes.of("m") {
            index.overlap(block::chain_root(None, None), &locals, &mut found);
        }
        found.sort();
        found.iter().map(|prefix| prefix.blocks).collect()
    }
}

async fn settle() {
    for _ in 0..300 {
        tokio::task::yield_now().await;
    }
}

fn replayed(sequences: impl IntoIterator<Item = u64>) -> Vec<SourceEvent> {
    let batches = sequences.into_iter().map(|sequence| {
        let at = sequence as u32;
        SourceEvent::Replayed(frame(sequence, vec![stored(at, at + 1)]))
    });
    batches.chain([SourceEvent::ReplayEnd]).collect()
}

fn live(sequence: u64) -> SourceEvent {
    let at = sequence as u32;
    SourceEvent::Live(frame(sequence, vec![stored(at, at + 1)]))
}

fn run_test<F: Future<Output = ()>>(test: F) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .unwrap();
    runtime.block_on(test);
}

const JOINS: &str = "warmroute_kv_joining_ranks ";

#[test]
fn only_so_many_ranks_are_asked_for_a_replay_at_once_and_all_become_live() {
    run_test(async {
        let settings = Settings {
            max_concurrent: 4,
            ..Settings::default()
        };
        let mut ranks = Ranks::start(40, &settings);
        settle().await;
        for rank in 0..40 {
            ranks.say(rank, [connected()]).await;
        }
        let mut joined = BTreeSet::new();
        while joined.len() < 40 {
            let asked = ranks.asked();
            assert_eq!(asked.len(), 4, "beside {} that joined", joined.len());
            assert_eq!(ranks.value(JOINS), 4);
            assert_eq!(
                ranks.value("warmroute_kv_joins_waiting "),
                36 - joined.len() as u64
            );
            for (rank, first) in asked {
                assert_eq!(first, 0);
                ranks.ranks[rank].say.send(live(3)).unwrap();
                ranks.say(rank, replayed(0..3)).await;
                joined.insert(rank);
            }
            settle().await;
        }
        assert_eq!(ranks.value(JOINS), 0);
        assert_eq!(ranks.value("warmroute_kv_joins_delayed_total "), 36);
        assert_eq!(ranks.depths(4), [4; 40]);
        let statuses = ranks.board.statuses(observe::now());
        assert!(statuses.iter().all(|status| status.state == "live"));
    });
}

#[test]
fn a_rank_that_disconnects_or_leaves_while_it_joins_lets_the_next_one_join() {
    run_test(async {
        let settings = Settings {
            max_concurrent: 1,
            ..Settings::default()
        };
        let mut ranks = Ranks::start(3, &settings);
        settle().await;
        for rank in 0..3 {
            ranks.say(rank, [connected()]).await;
        }
        assert_eq!(ranks.asked(), [(0, 0)]);
        ranks.say(0, [lost()]).await;
        assert_eq!(ranks.asked(), [(1, 0)]);
        // The first one waits behind the others.
        ranks.say(0, [connected()]).await;
        ranks.say(1, replayed(0..2)).await;
        assert_eq!(ranks.asked(), [(2, 0)]);
        ranks.say(2, replayed(0..2)).await;
        assert_eq!(ranks.asked(), [(0, 0)]);
        drop(ranks._running);
        settle().await;
        let text = ranks.registry.text();
        assert!(text.contains("warmroute_kv_joining_ranks 0\n"), "{text}");
    });
}

#[test]
fn all_ranks_together_keep_so_many_bytes_and_ask_again_for_the_rest() {
    const RANKS: usize = 20;
    run_test(async {
        let settings = Settings {
            max_concurrent: RANKS,
            max_queued_size: 2_000,
        };
        let mut ranks = Ranks::start(RANKS as u32, &settings);
        settle().await;
        for rank in 0..RANKS {
            ranks.say(rank, [connected()]).await;
        }
        assert_eq!(ranks.asked().len(), RANKS);
        for sequence in 5..45 {
            for rank in 0..RANKS {
                ranks.say(rank, [live(sequence)]).await;
            }
            // A frame has 100 bytes, and a rank's first is always kept.
            assert!(ranks.value("warmroute_kv_queued_bytes ") <= 2_000 + RANKS as u64 * 100);
        }
        let dropped = ranks.value("warmroute_kv_queue_full_total ");
        assert!(dropped >= (RANKS * 40 - 20 - RANKS) as u64, "{dropped}");
        for rank in 0..RANKS {
            ranks.say(rank, replayed(0..5)).await;
            ranks.say(rank, [live(45)]).await;
        }
        let again = ranks.asked();
        assert_eq!(again.len(), RANKS);
        for (rank, first) in again {
            ranks.say(rank, replayed(first..46)).await;
        }
        assert_eq!(ranks.value("warmroute_kv_queued_bytes "), 0);
        assert_eq!(ranks.depths(46), [46; RANKS]);
    });
}

/// Each such request would cost a connection, and the engine all that it has sent since the last one.
#[test]
fn a_response_is_not_asked_for_again_because_other_tasks_took_long() {
    run_test(async {
        let stream_settings = stream::Settings {
            replay_timeout: Duration::from_millis(40),
            ..stream::Settings::default()
        };
        let mut ranks = Ranks::start_with(1, &Settings::default(), stream_settings);
        settle().await;
        for said in [connected()].into_iter().chain(replayed(0..200)) {
            ranks.ranks[0].say.send(said).unwrap();
        }
        for _ in 0..4 {
            tokio::task::yield_now().await;
            // Another task, for longer than a response may pause.
            let until = observe::now() + Duration::from_millis(20);
            while observe::now() < until {
                std::hint::spin_loop();
            }
        }
        settle().await;
        assert_eq!(ranks.asked(), [(0, 0)]);
        assert!(ranks.asked().is_empty());
        assert_eq!(ranks.depths(200), [200]);
    });
}
