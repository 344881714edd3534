//! The table alone, and with the gauges of several replicas over a network that loses, doubles and reorders.

use std::collections::BTreeMap;
use std::time::Instant;

use bytes::Bytes;
use proptest::prelude::*;
use prost::Message;

use super::*;
use crate::observe;
use crate::peers::gauges::{Condition, Gauges};
use crate::peers::wire::peer_message::Kind;

const HEARTBEAT: Duration = Duration::from_millis(250);

fn id(number: u128) -> InstanceId {
    InstanceId::new(number)
}

fn load(requests: u64, queued_tokens: u64, context_tokens: u64) -> WorkerLoad {
    WorkerLoad {
        requests,
        queued_tokens,
        context_tokens,
        waiting: LoadShare::default(),
        uncomputed_prompts: queued_tokens,
        first: None,
    }
}

fn sum(table: &LoadTable, address: &str) -> WorkerLoad {
    table.sum(&WorkerKey::worker(&address.into()))
}

fn rank_sum(table: &LoadTable, address: &str, rank: u32) -> WorkerLoad {
    table.sum(&WorkerKey::rank(&address.into(), rank))
}

fn names(workers: &[(u32, &str, Option<u32>)]) -> wire::WorkerNames {
    let workers = workers
        .iter()
        .map(|(number, address, rank)| wire::WorkerName {
            number: *number,
            address: (*address).to_owned(),
            rank: *rank,
        });
    wire::WorkerNames {
        workers: workers.collect(),
    }
}

fn report(sequence: u64, is_whole: bool, requests: &[(u32, u32)]) -> wire::LoadReport {
    let workers = requests.iter().map(|(number, requests)| wire::WorkerLoad {
        number: *number,
        requests: *requests,
        ..wire::WorkerLoad::default()
    });
    wire::LoadReport {
        sequence,
        is_whole,
        workers: workers.collect(),
        ..wire::LoadReport::default()
    }
}

fn on_report(table: &mut LoadTable, peer: InstanceId, report: &wire::LoadReport) -> Applied {
    table.on_report(observe::now(), peer, report)
}

#[test]
fn reports_of_several_replicas_add_up_and_end_with_them() {
    let mut table = LoadTable::new(100);
    for peer in [1, 2] {
        table.on_stream(id(peer));
        table.on_names(id(peer), &names(&[(0, "a:1", None), (7, "b:1", None)]));
        on_report(&mut table, id(peer), &report(1, true, &[(0, 3), (7, 1)]));
    }
    assert_eq!(sum(&table, "a:1"), load(6, 0, 0));
    assert_eq!(table.load(id(1), "b:1"), load(1, 0, 0));
    on_report(&mut table, id(1), &report(2, false, &[(0, 0)]));
    assert_eq!(
        (sum(&table, "a:1"), sum(&table, "b:1")),
        (load(3, 0, 0), load(2, 0, 0))
    );
    table.remove(id(2));
    assert_eq!(
        (sum(&table, "a:1"), sum(&table, "b:1")),
        (load(0, 0, 0), load(1, 0, 0))
    );
    assert_eq!(table.take_changed().len(), 2);
    assert!(table.take_changed().is_empty());
}

#[test]
fn nothing_counts_before_a_whole_report_and_old_ones_are_ignored() {
    let mut table = LoadTable::new(100);
    let peer = id(1);
    table.on_stream(peer);
    table.on_names(peer, &names(&[(0, "a:1", None), (1, "b:1", None)]));
    on_report(&mut table, peer, &report(4, false, &[(0, 9)]));
    assert_eq!(sum(&table, "a:1"), load(0, 0, 0));
    assert!(on_report(&mut table, peer, &report(5, true, &[(0, 1), (1, 1)])).is_first);
    for old in [
        report(4, false, &[(0, 9)]),
        report(5, false, &[(0, 9)]),
        report(3, true, &[]),
    ] {
        on_report(&mut table, peer, &old);
        assert_eq!(sum(&table, "a:1"), load(1, 0, 0));
    }
    // Workers that a whole report does not name have no load.
    on_report(&mut table, peer, &report(6, true, &[(1, 2)]));
    assert_eq!(
        (sum(&table, "a:1"), sum(&table, "b:1")),
        (load(0, 0, 0), load(2, 0, 0))
    );
    // A new stream: the former load counts until its first report.
    table.on_stream(peer);
    assert_eq!(sum(&table, "b:1"), load(2, 0, 0));
    on_report(&mut table, peer, &report(1, true, &[]));
    assert_eq!(sum(&table, "b:1"), load(0, 0, 0));
}

/// A whole report of a worker and its first rank, with when the first ones in line there are due.
fn report_of_lines(sequence: u64, lines: [Option<(i32, i32)>; 2]) -> wire::LoadReport {
    let workers = (0..).zip(lines).map(|(number, line)| wire::WorkerLoad {
        number,
        waiting_requests: 1,
        first_due_ms: line.map(|(_, ms)| ms),
        first_priority: line.map_or(0, |(priority, _)| priority),
        ..wire::WorkerLoad::default()
    });
    wire::LoadReport {
        sequence,
        is_whole: true,
        workers: workers.collect(),
        ..wire::LoadReport::default()
    }
}

#[test]
fn of_the_first_ones_in_line_at_several_replicas_the_earliest_of_each_priority_counts() {
    let now = observe::now();
    let mut table = LoadTable::new(100);
    for peer in [1, 2, 3] {
        table.on_stream(id(peer));
        table.on_names(id(peer), &names(&[(0, "a:1", None), (1, "a:1", Some(0))]));
    }
    let first = |table: &LoadTable| {
        let ms = |due: DueTime| {
            let left = due.at.saturating_duration_since(now).as_millis();
            (due.priority, left)
        };
        keys("a:1").map(|key| {
            let mut first: Vec<_> = table.first(&key).into_iter().map(ms).collect();
            first.sort_unstable();
            first
        })
    };
    table.on_report(now, id(1), &report_of_lines(1, [Some((0, 30)), None]));
    table.on_report(
        now,
        id(2),
        &report_of_lines(1, [Some((0, 20)), Some((0, 40))]),
    );
    // One that does not say when what waits is due.
    table.on_report(now, id(3), &report_of_lines(1, [None, None]));
    assert_eq!(first(&table), [vec![(0, 20)], vec![(0, 40)], vec![]]);
    assert_eq!(sum(&table, "a:1").waiting.requests, 3);
    table.take_changed();
    table.on_report(now, id(1), &report_of_lines(2, [Some((1, 10)), None]));
    assert_eq!(table.take_changed().len(), 1);
    assert_eq!(first(&table)[0], [(0, 20), (1, 10)]);
    table.remove(id(2));
    assert_eq!(first(&table), [vec![(1, 10)], vec![], vec![]]);
    table.on_report(now, id(1), &report(3, true, &[]));
    assert!(table.first.is_empty());
}

#[test]
fn who_is_reported_to_be_first_again_changes_nothing_and_never_seems_due_earlier() {
    let start = observe::now();
    let ms = Duration::from_millis;
    let mut table = LoadTable::new(100);
    table.on_stream(id(1));
    table.on_names(id(1), &names(&[(0, "a:1", None), (1, "a:1", Some(0))]));
    let mut sequence = 0;
    let mut first = |at: u64, priority: i32, due: i32| {
        sequence += 1;
        let report = report_of_lines(sequence, [Some((priority, due)), None]);
        table.on_report(start + ms(at), id(1), &report);
        let is_changed = !table.take_changed().is_empty();
        let first = table.first(&keys("a:1")[0])[0];
        let due = first.at.duration_since(start).as_millis();
        (is_changed, first.priority, due)
    };
    assert_eq!(first(0, 0, 100), (true, 0, 100));
    // Reports take more time to arrive or less.
    assert_eq!(first(10, 0, 92), (true, 0, 102));
    assert_eq!(first(20, 0, 78), (false, 0, 102));
    assert_eq!(first(30, 0, 72), (false, 0, 102));
    // Another one is due clearly earlier, and one of another class.
    assert_eq!(first(40, 0, 57), (true, 0, 97));
    assert_eq!(first(50, 1, 46), (true, 1, 96));
}

#[test]
fn ranks_add_up_unless_the_whole_worker_is_reported_too() {
    let mut table = LoadTable::new(100);
    let peer = id(1);
    table.on_names(
        peer,
        &names(&[(0, "a:1", Some(0)), (1, "a:1", Some(1)), (2, "a:1", None)]),
    );
    on_report(&mut table, peer, &report(1, true, &[(0, 1), (1, 2)]));
    assert_eq!(sum(&table, "a:1"), load(3, 0, 0));
    on_report(&mut table, peer, &report(2, false, &[(2, 4)]));
    assert_eq!(sum(&table, "a:1"), load(4, 0, 0));
    assert_eq!(rank_sum(&table, "a:1", 1), load(2, 0, 0));
    // A replica of an earlier release reports workers only.
    table.on_names(id(2), &names(&[(0, "a:1", None)]));
    on_report(&mut table, id(2), &report(1, true, &[(0, 5)]));
    assert_eq!(sum(&table, "a:1"), load(9, 0, 0));
    assert_eq!(rank_sum(&table, "a:1", 1), load(2, 0, 0));
    table.remove(id(2));
    assert_eq!(table.take_changed().len(), 1);
    on_report(&mut table, peer, &report(3, false, &[(1, 3)]));
    assert_eq!(rank_sum(&table, "a:1", 1), load(3, 0, 0));
    assert_eq!(table.take_changed().len(), 1);
    on_report(
        &mut table,
        peer,
        &report(4, false, &[(0, 0), (1, 0), (2, 0)]),
    );
    assert_eq!(sum(&table, "a:1"), load(0, 0, 0));
    assert!(table.peers[&peer].by_address.is_empty());
    assert!(table.sums.is_empty());
}

#[test]
fn a_number_that_is_given_to_another_worker_takes_its_load_along() {
    let mut table = LoadTable::new(100);
    let peer = id(1);
    table.on_names(peer, &names(&[(0, "a:1", None)]));
    on_report(&mut table, peer, &report(1, true, &[(0, 5)]));
    table.on_names(peer, &names(&[(0, "b:1", None)]));
    assert_eq!(
        (sum(&table, "a:1"), sum(&table, "b:1")),
        (load(0, 0, 0), load(0, 0, 0))
    );
    on_report(&mut table, peer, &report(2, false, &[(0, 5)]));
    assert_eq!(sum(&table, "b:1"), load(5, 0, 0));
}

#[test]
fn what_is_beyond_the_limits_is_ignored_and_counted() {
    let mut table = LoadTable::new(2);
    let peer = id(1);
    let many = names(&[(0, "a:1", None), (1, "b:1", None), (2, "c:1", None)]);
    assert_eq!(table.on_names(peer, &many).ignored, 1);
    let long = "x".repeat(1_000);
    assert_eq!(table.on_names(peer, &names(&[(1, &long, None)])).ignored, 1);
    let all = report(1, true, &[(0, u32::MAX), (2, 1), (9, 1)]);
    assert_eq!(on_report(&mut table, peer, &all).ignored, 2);
    assert_eq!(sum(&table, "a:1"), load(MAX_REQUESTS.into(), 0, 0));
    assert_eq!(table.unknown_workers(peer, |address| address == "a:1"), 1);
}

/// One replica that reports, and its stream to the table.
struct Replica {
    id: InstanceId,
    gauges: Gauges,
    /// Worker or rank -> what it has there.
    truth: BTreeMap<WorkerKey, WorkerLoad>,
    /// Messages on their way.
    on_the_way: Vec<Bytes>,
}

#[derive(Clone, Debug)]
enum Step {
    /// A replica's load at a worker becomes this.
    Load {
        replica: usize,
        worker: u8,
        load: (u8, u16, u16),
    },
    /// All report; this many milliseconds pass.
    Tick { ms: u16 },
    /// The message at this place of a replica's queue arrives (and stays, if doubled).
    Arrive {
        replica: usize,
        place: u8,
        doubled: bool,
    },
    /// The message at this place is lost.
    Lose { replica: usize, place: u8 },
    /// The stream ends and begins anew.
    Reconnect { replica: usize },
    /// The process is replaced by another one.
    Restart { replica: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let replica = 0..3_usize;
    prop_oneof![
        4 => (replica.clone(), 0..5_u8, any::<(u8, u16, u16)>())
            .prop_map(|(replica, worker, load)| Step::Load { replica, worker, load }),
        4 => (1..400_u16).prop_map(|ms| Step::Tick { ms }),
        4 => (replica.clone(), 0..4_u8, any::<bool>())
            .prop_map(|(replica, place, doubled)| Step::Arrive { replica, place, doubled }),
        2 => (replica.clone(), 0..4_u8).prop_map(|(replica, place)| Step::Lose { replica, place }),
        1 => replica.clone().prop_map(|replica| Step::Reconnect { replica }),
        1 => replica.prop_map(|replica| Step::Restart { replica }),
    ]
}

/// A worker and its two ranks.
fn keys(address: &str) -> [WorkerKey; 3] {
    [None, Some(0), Some(1)].map(|rank| WorkerKey {
        address: address.into(),
        rank,
    })
}

struct World {
    now: Instant,
    replicas: Vec<Replica>,
    table: LoadTable,
    /// What routing was last given.
    written: BTreeMap<WorkerKey, WorkerLoad>,
    ids: u128,
}

impl World {
    fn new() -> Self {
        let now = observe::now();
        let mut world = Self {
            now,
            replicas: Vec::new(),
            table: LoadTable::new(100),
            written: BTreeMap::new(),
            ids: 0,
        };
        for _ in 0..3 {
            let replica = world.replica();
            world.replicas.push(replica);
        }
        (0..3).for_each(|replica| world.connect(replica));
        world
    }

    fn replica(&mut self) -> Replica {
        self.ids += 1;
        Replica {
            id: id(self.ids),
            gauges: Gauges::new(self.now, HEARTBEAT),
            truth: BTreeMap::new(),
            on_the_way: Vec::new(),
        }
    }

    fn connect(&mut self, replica: usize) {
        let replica = &mut self.replicas[replica];
        self.table.on_stream(replica.id);
        replica.on_the_way = replica.gauges.whole().into();
    }

    fn tick(&mut self, ms: u16) {
        self.now += Duration::from_millis(ms.into());
        for replica in &mut self.replicas {
            let loads = replica.truth.iter().map(|(key, load)| (key.clone(), *load));
            let messages = replica.gauges.report(self.now, Condition::default(), loads);
            replica.on_the_way.extend(messages);
        }
    }

    fn deliver(&mut self, peer: InstanceId, framed: &Bytes) {
        match wire::PeerMessage::decode(framed.slice(5..)).unwrap().kind {
            Some(Kind::Workers(names)) => {
                self.table.on_names(peer, &names);
            }
            Some(Kind::Load(report)) => {
                self.table.on_report(self.now, peer, &report);
            }
            other => panic!("{other:?}"),
        }
        self.write();
    }

    fn write(&mut self) {
        for address in self.table.take_changed() {
            for key in keys(&address) {
                let sum = self.table.sum(&key);
                self.written.insert(key, sum);
            }
        }
    }

    fn apply(&mut self, step: Step) {
        match step {
            Step::Load {
                replica,
                worker,
                load: (requests, queued, decode),
            } => {
                let [requests, queued, decode]: [u64; 3] =
                    [requests.into(), queued.into(), decode.into()];
                // Some of it is pinned to the ranks.
                let waiting = |part: u64| LoadShare {
                    requests: (decode / part) as u32,
                    queued_tokens: requests / part,
                    context_tokens: queued / part,
                };
                let of_key = [1, 2, 5].map(|part| WorkerLoad {
                    waiting: waiting(part),
                    ..load(requests / part, queued / part, decode / part)
                });
                let keys = keys(&format!("w{worker}:1"));
                let truth = &mut self.replicas[replica].truth;
                truth.extend(keys.into_iter().zip(of_key));
            }
            Step::Tick { ms } => self.tick(ms),
            Step::Arrive {
                replica,
                place,
                doubled,
            } => {
                let peer = &mut self.replicas[replica];
                let (id, place) = (peer.id, usize::from(place));
                let Some(message) = peer.on_the_way.get(place).cloned() else {
                    return;
                };
                if !doubled {
                    peer.on_the_way.remove(place);
                }
                self.deliver(id, &message);
            }
            Step::Lose { replica, place } => {
                let messages = &mut self.replicas[replica].on_the_way;
                if usize::from(place) < messages.len() {
                    messages.remove(place.into());
                }
            }
            Step::Reconnect { replica } => self.connect(replica),
            Step::Restart { replica } => {
                self.table.remove(self.replicas[replica].id);
                self.write();
                self.replicas[replica] = self.replica();
                self.connect(replica);
            }
        }
    }

    /// Messages flow again, in order: those on their way, and what a second brings.
    fn settle(&mut self) {
        // A stream on which names were lost is no stream of ours: it ends, and the next one has them.
        (0..3).for_each(|replica| self.connect(replica));
        for _ in 0..5 {
            self.tick(250);
            for replica in 0..3 {
                let peer = self.replicas[replica].id;
                for message in std::mem::take(&mut self.replicas[replica].on_the_way) {
                    self.deliver(peer, &message);
                }
            }
        }
    }

    fn check(&self) {
        for worker in 0..5 {
            for key in keys(&format!("w{worker}:1")) {
                let mut expected = WorkerLoad::default();
                for replica in &self.replicas {
                    let truth = replica.truth.get(&key).copied().unwrap_or_default();
                    expected = exchange(expected, WorkerLoad::default(), truth);
                }
                assert_eq!(self.table.sum(&key), expected, "{key:?}");
                let written = self.written.get(&key).copied().unwrap_or_default();
                assert_eq!(written, expected, "{key:?} as routing sees it");
            }
        }
    }
}

proptest! {
    #[test]
    fn once_messages_flow_the_sums_equal_the_truth(
        steps in proptest::collection::vec(step(), 0..120),
    ) {
        let mut world = World::new();
        for step in steps {
            world.apply(step);
        }
        world.settle();
        world.check();
    }

    #[test]
    fn lost_reports_are_healed_by_the_next_whole_one_on_the_same_stream(
        loads in proptest::collection::vec((0..5_u8, any::<(u8, u16, u16)>()), 1..40),
        lost in proptest::collection::vec(any::<bool>(), 40),
    ) {
        let mut world = World::new();
        // Every worker is named before anything is lost.
        for worker in 0..5 {
            world.apply(Step::Load { replica: 0, worker, load: (1, 1, 1) });
        }
        world.tick(20);
        let first = std::mem::take(&mut world.replicas[0].on_the_way);
        first.iter().for_each(|message| world.deliver(id(1), message));
        for ((worker, load), is_lost) in loads.into_iter().zip(lost) {
            world.apply(Step::Load { replica: 0, worker, load });
            world.tick(20);
            for message in std::mem::take(&mut world.replicas[0].on_the_way) {
                if !is_lost {
                    world.deliver(id(1), &message);
                }
            }
        }
        for _ in 0..5 {
            world.tick(250);
            for message in std::mem::take(&mut world.replicas[0].on_the_way) {
                world.deliver(id(1), &message);
            }
        }
        world.check();
    }

    #[test]
    fn foreign_messages_never_panic(
        messages in proptest::collection::vec(
            (any::<bool>(), any::<u64>(), any::<bool>(), proptest::collection::vec(
                (0..6_u32, 0..3_u8, proptest::option::of(0..2_u32), any::<(u32, u64, u64)>()), 0..6)),
            0..40,
        ),
    ) {
        let mut table = LoadTable::new(4);
        for (is_names, sequence, is_whole, workers) in messages {
            if is_names {
                let workers = workers.iter().map(|(number, address, rank, _)| wire::WorkerName {
                    number: *number,
                    address: format!("w{address}"),
                    rank: *rank,
                });
                table.on_names(id(1), &wire::WorkerNames { workers: workers.collect() });
            } else {
                let workers = workers.iter().map(|(number, _, _, load)| wire::WorkerLoad {
                    number: *number,
                    requests: load.0,
                    queued_tokens: load.1,
                    context_tokens: load.2,
                    waiting_requests: load.0,
                    waiting_queued_tokens: load.2,
                    waiting_context_tokens: load.1,
                    uncomputed_prompts: load.2,
                    first_due_ms: (load.0 % 2 == 0).then_some(load.0 as i32),
                    first_priority: 0,
                });
                let report = wire::LoadReport {
                    sequence,
                    is_whole,
                    workers: workers.collect(),
                    ..wire::LoadReport::default()
                };
                on_report(&mut table, id(1), &report);
            }
        }
        table.remove(id(1));
        prop_assert!(table.sums.is_empty() && table.first.is_empty());
    }
}

#[test]
fn workers_and_replicas_that_come_and_go_for_an_hour_leave_nothing_behind() {
    let mut now = observe::now();
    let mut table = LoadTable::new(2_000);
    let mut gauges = Gauges::new(now, HEARTBEAT);
    let mut peer = id(0);
    let mut largest = 0;
    // Every second another set of 20 workers, every minute another process.
    for second in 0..3_600_u32 {
        now += Duration::from_secs(1);
        if second % 60 == 0 {
            table.remove(peer);
            peer = id(second.into());
            gauges = Gauges::new(now, HEARTBEAT);
            table.on_stream(peer);
        }
        let address = |worker: u32| Arc::<str>::from(format!("10.0.0.{worker}:{second}"));
        let workers: Vec<_> = (0..20).map(address).collect();
        let key = |address: &Arc<str>| WorkerKey {
            address: address.clone(),
            rank: None,
        };
        let loads = workers
            .iter()
            .map(|address| (key(address), load(1, 100, 10)));
        for message in gauges.report(now, Condition::default(), loads) {
            match wire::PeerMessage::decode(message.slice(5..)).unwrap().kind {
                Some(Kind::Workers(names)) => assert_eq!(table.on_names(peer, &names).ignored, 0),
                Some(Kind::Load(report)) => {
                    assert_eq!(table.on_report(now, peer, &report).ignored, 0)
                }
                other => panic!("{other:?}"),
            }
        }
        table.take_changed();
        gauges.forget(now, |address| {
            workers.iter().any(|worker| **worker == *address)
        });
        largest = largest.max(table.sums.len() + table.peers[&peer].by_address.len());
        assert!(table.peers[&peer].workers.len() <= 2_000);
    }
    assert_eq!(table.peers.len(), 1);
    assert!(largest <= 2 * 40, "{largest}");
}
