use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::kv::event::{EngineHash, Event, Removed, Stored};
use crate::kv::protobuf::{Message, decode_batch};

const LIMITS: Limits = Limits {
    history_batches: 5,
    history_bytes: 1 << 20,
    state_bytes: 1 << 20,
};

fn incarnation() -> Incarnation {
    Incarnation::new(3, "e".to_owned(), 1_000, 0, LIMITS)
}

fn store(hashes: &[u64], parent: Option<u64>) -> Batch {
    let event = Event::Stored(Stored {
        hashes: hashes.iter().copied().map(EngineHash).collect(),
        parent: parent.map(EngineHash),
        token_ids: hashes.iter().map(|name| *name as u32).collect(),
        block_size: 1,
        ..Stored::default()
    });
    Batch {
        events: vec![event],
        ..Batch::default()
    }
}

fn removed(name: u64) -> Batch {
    let event = Event::Removed(Removed {
        hashes: vec![EngineHash(name)],
        ..Removed::default()
    });
    Batch {
        events: vec![event],
        ..Batch::default()
    }
}

impl Incarnation {
    /// Subscribes as a client does that makes the snapshot that it needs.
    fn start(&mut self, after: u64) -> Result<Start, Gone> {
        let mut has_waited = false;
        loop {
            match self.subscribe(after, has_waited)? {
                SubscribeOutcome::Now(start) => return Ok(start),
                SubscribeOutcome::MakeSnapshot(job) => self.snapshot_finished(job.make()),
                outcome => panic!("{outcome:?}"),
            }
            has_waited = true;
        }
    }

    fn is_busy(&mut self) -> bool {
        matches!(self.subscribe(0, false), Ok(SubscribeOutcome::Busy))
    }
}

/// A subscriber over the wire, with the copies that it holds.
#[derive(Debug, Default, PartialEq)]
struct Reader {
    copies: BTreeMap<u64, u32>,
    number: u64,
}

impl Reader {
    fn subscribe(incarnation: &mut Incarnation, after: u64) -> Result<Self, Gone> {
        let start = incarnation.start(after)?;
        let mut reader = Self::default();
        for part in &*start.parts {
            reader.read(part);
        }
        assert!(
            start.parts.is_empty() || reader.number + 1 == start.next,
            "the batches go on from the snapshot"
        );
        reader.number = start.next - 1;
        reader.go_on(incarnation);
        Ok(reader)
    }

    fn go_on(&mut self, incarnation: &Incarnation) {
        while let Some(message) = incarnation.history().get(self.number + 1) {
            self.read(&message.clone());
        }
    }

    fn read(&mut self, framed: &Bytes) {
        let Message {
            sequence, batch, ..
        } = decode_batch(&framed[5..]).unwrap();
        assert!(self.number == 0 || sequence == self.number + 1);
        assert_eq!(batch.rank, Some(3));
        self.number = sequence;
        for event in batch.events {
            match event {
                Event::Stored(event) => {
                    for name in event.hashes {
                        *self.copies.entry(name.0).or_default() += 1;
                    }
                }
                Event::Removed(event) => {
                    for name in event.hashes {
                        *self.copies.get_mut(&name.0).unwrap() -= 1;
                    }
                }
                Event::Cleared { .. } => self.copies.clear(),
                Event::Unknown { .. } => unreachable!(),
            }
        }
        self.copies.retain(|_, count| *count > 0);
    }
}

proptest! {
    #[test]
    fn whoever_joins_when_ever_holds_the_same(
        choices in proptest::collection::vec((any::<bool>(), 1u64..6, any::<bool>()), 0..40),
    ) {
        let mut incarnation = incarnation();
        let mut early = Reader::subscribe(&mut incarnation, 0).unwrap();
        let mut all = Vec::new();
        for (removes, name, joins) in choices {
            let batch = if removes && early.copies.contains_key(&name) {
                removed(name)
            } else {
                // Each block below the one before it, as far as it is there.
                let parent = (name - 1..name).find(|parent| early.copies.contains_key(parent));
                store(&[name], parent)
            };
            incarnation.push(batch).unwrap();
            early.go_on(&incarnation);
            if joins {
                all.push(Reader::subscribe(&mut incarnation, 0).unwrap());
            }
            for late in &mut all {
                late.go_on(&incarnation);
                prop_assert_eq!(&*late, &early);
            }
        }
    }
}

#[test]
fn a_number_is_continued_strictly_after_it_or_not_at_all() {
    let mut incarnation = incarnation();
    for name in 1..=8 {
        incarnation.push(store(&[name], None)).unwrap();
    }
    assert_eq!(incarnation.number(), 1_008);
    let next =
        |incarnation: &mut Incarnation, after| incarnation.start(after).map(|start| start.next);
    // Five are kept: 1,004 to 1,008.
    let gone = Err(Gone { oldest: 1_003 });
    for (after, expected) in [
        (1_008, Ok(1_009)),
        (1_003, Ok(1_004)),
        (1_002, gone),
        (1_009, gone),
        (1, gone),
    ] {
        assert_eq!(next(&mut incarnation, after), expected, "{after}");
    }
    assert!(incarnation.start(1_005).unwrap().parts.is_empty());
}

#[test]
fn a_snapshot_is_followed_by_a_batch_once_there_was_one() {
    let mut incarnation = incarnation();
    let start = incarnation.start(0).unwrap();
    assert_eq!((start.parts.len(), start.next), (1, 1_001));
    incarnation.push(store(&[1], None)).unwrap();
    let start = incarnation.start(0).unwrap();
    assert_eq!((start.parts.len(), start.next), (1, 1_001));
    incarnation.push(store(&[2], None)).unwrap();
    let start = incarnation.start(0).unwrap();
    assert!(start.next <= incarnation.number());
}

#[test]
fn nobody_goes_on_from_half_a_snapshot() {
    let limits = Limits {
        history_batches: 100,
        history_bytes: 1 << 30,
        state_bytes: 1 << 30,
    };
    let mut incarnation = Incarnation::new(0, "e".to_owned(), 1_000, 0, limits);
    for name in 0..50 {
        // Some 160 kB of tokens each.
        let event = Event::Stored(Stored {
            hashes: vec![EngineHash(name)],
            token_ids: vec![1 << 31; 32_000],
            block_size: 32_000,
            ..Stored::default()
        });
        let batch = Batch {
            events: vec![event],
            ..Batch::default()
        };
        incarnation.push(batch).unwrap();
    }
    let start = incarnation.start(0).unwrap();
    let parts = start.parts.len() as u64;
    assert!(parts > 2, "{parts}");
    let last = start.next - 1;
    for number in last + 1 - parts..last {
        assert!(incarnation.start(number).is_err(), "{number}");
    }
    for number in [last - parts, last, last + 1] {
        assert!(incarnation.start(number).is_ok(), "{number}");
    }
}

#[test]
fn a_life_goes_on_while_it_is_listed() {
    let mut incarnation = incarnation();
    for name in 1..=2 {
        incarnation.push(store(&[name], None)).unwrap();
    }
    let Ok(SubscribeOutcome::MakeSnapshot(job)) = incarnation.subscribe(0, false) else {
        panic!("there is no list yet");
    };
    assert!(matches!(
        incarnation.subscribe(0, false),
        Ok(SubscribeOutcome::Wait)
    ));
    assert!(matches!(
        incarnation.subscribe(1_002, false),
        Ok(SubscribeOutcome::Now(_))
    ));
    for name in 3..=4 {
        incarnation.push(store(&[name], None)).unwrap();
    }
    incarnation.push(removed(1)).unwrap();
    incarnation.snapshot_finished(job.make());
    assert_eq!(incarnation.block_sizes()[0], 4);
    let reader = Reader::subscribe(&mut incarnation, 0).unwrap();
    assert_eq!(reader.copies, BTreeMap::from([(2, 1), (3, 1), (4, 1)]));
}

#[test]
fn a_list_that_the_history_has_passed_is_not_made_again_and_again() {
    let mut incarnation = incarnation();
    incarnation.push(store(&[1], None)).unwrap();
    let Ok(SubscribeOutcome::MakeSnapshot(job)) = incarnation.subscribe(0, false) else {
        panic!("there is no list yet");
    };
    for name in 2..10 {
        incarnation.push(store(&[name], None)).unwrap();
    }
    incarnation.snapshot_finished(job.make());
    assert!(matches!(
        incarnation.subscribe(0, true),
        Ok(SubscribeOutcome::Busy)
    ));
}

#[test]
fn only_so_many_lists_are_there_at_a_time() {
    let mut incarnation = incarnation();
    let pass = |incarnation: &mut Incarnation| {
        for name in 0..6 {
            incarnation.push(store(&[name], None)).unwrap();
        }
    };
    let mut read = Vec::new();
    for _ in 0..MAX_SNAPSHOTS {
        pass(&mut incarnation);
        read.push(incarnation.start(0).unwrap());
    }
    pass(&mut incarnation);
    assert!(incarnation.is_busy());
    read.pop();
    assert!(!incarnation.is_busy());
}

#[test]
fn what_was_missed_before_is_said() {
    let mut incarnation = Incarnation::new(0, "e".to_owned(), 9, 7, LIMITS);
    incarnation.push(store(&[1], None)).unwrap();
    let start = incarnation.start(0).unwrap();
    let chunk = decode_batch(&start.parts[0][5..])
        .unwrap()
        .snapshot
        .unwrap();
    assert_eq!((chunk.index, chunk.count, chunk.unknown_before), (0, 1, 7));
}

#[test]
fn what_had_no_room_makes_the_list_a_part() {
    let limits = Limits {
        state_bytes: 200,
        ..LIMITS
    };
    let mut incarnation = Incarnation::new(0, "e".to_owned(), 9, 0, limits);
    for name in 1..4 {
        incarnation.push(store(&[name], None)).unwrap();
    }
    let start = incarnation.start(0).unwrap();
    let message = decode_batch(&start.parts[0][5..]).unwrap();
    assert_eq!(message.snapshot.unwrap().unknown_before, 1);
}

#[test]
fn a_batch_that_may_have_removed_anything_is_not_taken() {
    let mut incarnation = incarnation();
    let kind = "New".into();
    let batch = Batch {
        events: vec![Event::Unknown { kind, hashes: None }],
        ..Batch::default()
    };
    assert!(incarnation.push(batch).is_err());
    assert_eq!(incarnation.number(), 1_000);
}

#[test]
fn a_store_that_is_left_out_makes_snapshots_a_part_until_the_engine_clears_its_cache() {
    let mut incarnation = Incarnation::new(0, "e".to_owned(), 9, 5, LIMITS);
    let sparse = Event::Stored(Stored {
        hashes: vec![EngineHash(7)],
        token_ids: vec![1, 2],
        block_size: 1,
        ..Stored::default()
    });
    let with_sparse = Batch {
        events: vec![sparse.clone()],
        ..store(&[1], None)
    };
    assert_eq!(incarnation.push(with_sparse).unwrap().len(), 1);
    incarnation.push(store(&[2], None)).unwrap();
    assert_eq!(incarnation.block_sizes()[2], 1);
    let clear = Batch {
        events: vec![Event::Cleared { ownership: None }],
        ..Batch::default()
    };
    incarnation.push(clear).unwrap();
    incarnation.push(store(&[3], None)).unwrap();
    assert_eq!(incarnation.unknown_before(), 0);
    assert_eq!(incarnation.block_sizes()[2], 0);
    // Stored after the clear of its own batch, as vLLM sends a clear with the next stores.
    let after_clear = Batch {
        events: vec![Event::Cleared { ownership: None }, sparse],
        ..Batch::default()
    };
    incarnation.push(after_clear).unwrap();
    incarnation.push(store(&[4], None)).unwrap();
    assert_eq!(incarnation.unknown_before(), 0);
    assert_eq!(incarnation.block_sizes()[2], 1);
}
