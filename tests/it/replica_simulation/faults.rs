//! The faults: some at a given time, some triggered by a request to the store.

use std::time::Duration;

use fastrand::Rng;

use super::store_request::StoreRequest;
use super::{CALM, REPLICAS};

#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    /// A replica is killed and restarts as a new owner.
    Kill(usize),
    /// A replica stops for this long and then continues, as a paused VM does.
    Pause(usize, Duration),
    /// A replica drains.
    Drain(usize),
    /// Every run of a replica stops without a terminal event, as after a panic.
    Break(usize),
    /// The store does not answer.
    Down(Duration),
    /// As `Down`, and the store comes back empty.
    Empty(Duration),
    /// The store executes requests, but its replies are lost.
    Lose(Duration),
}

/// The request that triggers a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    Create,
    Start,
    Append,
    Finalize,
    Cancel,
    TakeOver,
    Release,
    FinalizeCancelled,
    Heartbeat,
}

#[derive(Debug)]
struct Trap {
    moment: Moment,
    /// How many such requests pass before the fault.
    left: u32,
    kind: u8,
}

#[derive(Debug)]
pub(super) struct Faults {
    traps: Vec<Trap>,
    down_until: Duration,
    loses_until: Duration,
    was_emptied: bool,
    /// Whether the store may refuse a finalization as too large.
    has_large_ends: bool,
}

impl Faults {
    pub(super) fn new(random: &mut Rng) -> Self {
        const MOMENTS: [Moment; 9] = [
            Moment::Create,
            Moment::Start,
            Moment::Append,
            Moment::Finalize,
            Moment::Cancel,
            Moment::TakeOver,
            Moment::Release,
            Moment::FinalizeCancelled,
            Moment::Heartbeat,
        ];
        let trap = |random: &mut Rng| Trap {
            moment: MOMENTS[random.usize(..MOMENTS.len())],
            left: random.u32(0..3),
            kind: random.u8(..12),
        };
        Self {
            traps: (0..random.u8(0..3)).map(|_| trap(random)).collect(),
            down_until: Duration::ZERO,
            loses_until: Duration::ZERO,
            was_emptied: false,
            has_large_ends: random.u8(..8) == 0,
        }
    }

    /// Faults at fixed times.
    pub(super) fn timed(&mut self, random: &mut Rng) -> Vec<(Duration, Fault)> {
        let count = random.u8(0..4);
        let one = |_| {
            let at = Duration::from_millis(random.u64(500..20_000));
            let kind = random.u8(..12);
            (at, fault(kind, random.usize(..REPLICAS), random))
        };
        (0..count).map(one).collect()
    }

    /// The fault that this request triggers, if any.
    pub(super) fn on_send(
        &mut self,
        at: usize,
        ask: &StoreRequest,
        random: &mut Rng,
    ) -> Option<Fault> {
        let moment = match ask {
            StoreRequest::Create(..) => Moment::Create,
            StoreRequest::Start(..) => Moment::Start,
            StoreRequest::Append(..) => Moment::Append,
            StoreRequest::Finalize(..) => Moment::Finalize,
            StoreRequest::Cancel(..) => Moment::Cancel,
            StoreRequest::TakeOver(..) => Moment::TakeOver,
            StoreRequest::Release(..) => Moment::Release,
            StoreRequest::FinalizeCancelled(..) => Moment::FinalizeCancelled,
            StoreRequest::Heartbeat(..) => Moment::Heartbeat,
            _ => return None,
        };
        let place = self.traps.iter().position(|trap| trap.moment == moment)?;
        let trap = &mut self.traps[place];
        if trap.left > 0 {
            trap.left -= 1;
            return None;
        }
        let trap = self.traps.remove(place);
        Some(fault(trap.kind, at, random))
    }

    /// No faults from now on.
    pub(super) fn end(&mut self, now: Duration) {
        self.traps.clear();
        self.down_until = now;
        self.loses_until = now;
        self.has_large_ends = false;
    }

    /// Takes away the faults that requests trigger.
    pub(super) fn without_traps(&mut self) {
        self.traps.clear();
        self.has_large_ends = false;
    }

    pub(super) fn down(&mut self, now: Duration, length: Duration) {
        self.down_until = self.down_until.max((now + length).min(CALM));
    }

    pub(super) fn is_down(&self, now: Duration) -> bool {
        now < self.down_until
    }

    pub(super) fn empty(&mut self) {
        self.was_emptied = true;
    }

    pub(super) fn was_emptied(&self) -> bool {
        self.was_emptied
    }

    pub(super) fn lose(&mut self, now: Duration, length: Duration) {
        self.loses_until = now + length;
    }

    pub(super) fn loses(&self, now: Duration) -> bool {
        now < self.loses_until
    }

    /// Whether the store refuses this finalization as too large. One without a delta table is always accepted.
    pub(super) fn finds_too_large(&self, ask: &StoreRequest) -> bool {
        let StoreRequest::Finalize(_, _, end) = ask else {
            return false;
        };
        self.has_large_ends && end.token.0 % 3 == 0 && !end.delta_table.is_empty()
    }
}

fn fault(kind: u8, at: usize, random: &mut Rng) -> Fault {
    let mut ms = |range| Duration::from_millis(random.u64(range));
    match kind {
        0..3 => Fault::Kill(at),
        // Some are longer than the lease.
        3..6 => Fault::Pause(at, ms(2_000..25_000)),
        6 | 7 => Fault::Drain(at),
        8 => Fault::Down(ms(100..3_000)),
        9 => Fault::Down(ms(8_000..20_000)),
        10 => Fault::Lose(ms(1_000..15_000)),
        _ => Fault::Empty(ms(100..2_000)),
    }
}
