//! What goes wrong, and when: at a moment, or just as something is asked of the store.

use std::time::Duration;

use fastrand::Rng;

use super::shop::Ask;
use super::{CALM, REPLICAS};

/// One thing that goes wrong.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    /// A replica is gone in an instant, and comes back as another.
    Kill(usize),
    /// It stands still, and goes on as if nothing had been.
    Pause(usize, Duration),
    /// It is told to stop.
    Drain(usize),
    /// All that it runs ends without an end, as by a panic.
    Break(usize),
    /// The store does not answer.
    Down(Duration),
    /// As `Down`, and it has forgotten all.
    Empty(Duration),
    /// The store does what it is asked, and its answers get lost.
    Lose(Duration),
}

/// What a fault waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    Create,
    Start,
    Append,
    Finalize,
    Cancel,
    Adopt,
    Release,
    Amend,
    Beat,
}

#[derive(Debug)]
struct Trap {
    moment: Moment,
    /// How many of them pass before.
    left: u32,
    kind: u8,
}

#[derive(Debug)]
pub(super) struct Faults {
    traps: Vec<Trap>,
    down_until: Duration,
    loses_until: Duration,
    was_emptied: bool,
    /// Whether ends may be too large for the store.
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
            Moment::Adopt,
            Moment::Release,
            Moment::Amend,
            Moment::Beat,
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

    /// Those that come at their time.
    pub(super) fn timed(&mut self, random: &mut Rng) -> Vec<(Duration, Fault)> {
        let count = random.u8(0..4);
        let one = |_| {
            let at = Duration::from_millis(random.u64(500..20_000));
            let kind = random.u8(..12);
            (at, fault(kind, random.usize(..REPLICAS), random))
        };
        (0..count).map(one).collect()
    }

    /// What happens because of what is asked.
    pub(super) fn on_send(&mut self, at: usize, ask: &Ask, random: &mut Rng) -> Option<Fault> {
        let moment = match ask {
            Ask::Create(..) => Moment::Create,
            Ask::Start(..) => Moment::Start,
            Ask::Append(..) => Moment::Append,
            Ask::Finalize(..) => Moment::Finalize,
            Ask::Cancel(..) => Moment::Cancel,
            Ask::Adopt(..) => Moment::Adopt,
            Ask::Release(..) => Moment::Release,
            Ask::Amend(..) => Moment::Amend,
            Ask::Beat(..) => Moment::Beat,
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

    /// Whether the store will not take it, now and at any time: an end is, unless nothing is kept with it.
    pub(super) fn finds_too_large(&self, ask: &Ask) -> bool {
        let Ask::Finalize(_, _, end) = ask else {
            return false;
        };
        self.has_large_ends && end.token.0 % 3 == 0 && !end.delta_table.is_empty()
    }
}

fn fault(kind: u8, at: usize, random: &mut Rng) -> Fault {
    let mut ms = |range| Duration::from_millis(random.u64(range));
    match kind {
        0..3 => Fault::Kill(at),
        // Some longer than the lease, some not.
        3..6 => Fault::Pause(at, ms(2_000..25_000)),
        6 | 7 => Fault::Drain(at),
        8 => Fault::Down(ms(100..3_000)),
        9 => Fault::Down(ms(8_000..20_000)),
        10 => Fault::Lose(ms(1_000..15_000)),
        _ => Fault::Empty(ms(100..2_000)),
    }
}
