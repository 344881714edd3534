//! Where lines of batches wait until the fleet has room that no interactive request wants. They are let in in the order
//! in which they came, as many at each look as there is room for their model.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use prometheus::IntGauge;
use tokio::sync::{Notify, oneshot};

use super::send::SendLine;
use crate::relay::{EnteringLine, EnteringLines, SpareRoom};

/// Time between two looks. A worker that becomes idle is idle for half of it on average, which is a step or two.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// Lines that wait. Each shard that runs here has a bounded number of them.
#[derive(Debug)]
pub struct RoomGate {
    models: Mutex<BTreeMap<Arc<str>, ModelGate>>,
    arrived: Notify,
    waiting: IntGauge,
}

/// The lines of one model.
#[derive(Debug, Default)]
struct ModelGate {
    waiting: VecDeque<WaitingLine>,
    /// Those that were let in and that no worker's load shows yet.
    entering: Arc<EnteringLines>,
}

#[derive(Debug)]
struct WaitingLine {
    /// About as many as its prompt has.
    tokens: u64,
    /// Closed once nobody waits for it any more.
    wake: oneshot::Sender<EnteringLine>,
}

/// Counts a line as waiting for as long as it lives.
struct WaitingCount<'a>(&'a IntGauge);

impl Drop for WaitingCount<'_> {
    fn drop(&mut self) {
        self.0.dec();
    }
}

impl RoomGate {
    /// `waiting`: shows how many wait.
    pub fn new(waiting: IntGauge) -> Self {
        Self {
            models: Mutex::default(),
            arrived: Notify::new(),
            waiting,
        }
    }

    /// Waits until a line for the model may be sent. `None`: the gate has gone, because the router ends.
    pub async fn enter(&self, model: &str, tokens: u64) -> Option<EnteringLine> {
        let (wake, woken) = oneshot::channel();
        self.waiting.inc();
        let _count = WaitingCount(&self.waiting);
        self.push(model, WaitingLine { tokens, wake });
        self.arrived.notify_one();
        woken.await.ok()
    }

    /// Lets lines in for as long as this is polled.
    pub async fn run(&self, sender: &dyn SendLine) {
        loop {
            if self.is_empty() {
                self.arrived.notified().await;
            }
            self.look(sender);
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }

    fn push(&self, model: &str, line: WaitingLine) {
        let mut models = self.models.lock();
        if let Some(gate) = models.get_mut(model) {
            gate.waiting.push_back(line);
            return;
        }
        let mut gate = ModelGate::default();
        gate.waiting.push_back(line);
        models.insert(model.into(), gate);
    }

    fn is_empty(&self) -> bool {
        let models = self.models.lock();
        models.values().all(|gate| gate.waiting.is_empty())
    }

    /// Lets in what there is room for now.
    fn look(&self, sender: &dyn SendLine) {
        let mut names: Vec<Arc<str>> = {
            let mut models = self.models.lock();
            for gate in models.values_mut() {
                gate.waiting.retain(|line| !line.wake.is_closed());
            }
            // Lines that are entering share the count with those that come next.
            models.retain(|_, gate| !gate.waiting.is_empty() || gate.entering.lines() > 0);
            let waiting = models.iter().filter(|(_, gate)| !gate.waiting.is_empty());
            waiting.map(|(name, _)| name.clone()).collect()
        };
        if !names.is_empty() {
            let first = fastrand::usize(..names.len());
            names.rotate_left(first);
        }
        for name in names {
            // Not under the lock: it looks at all workers of the model.
            let room = sender.room(&name);
            let mut models = self.models.lock();
            // Models may share workers: adapters, aliases. So what enters for one is no room for another.
            let (mut lines, mut tokens) = (0_u32, 0_u64);
            for gate in models.values() {
                lines = lines.saturating_add(gate.entering.lines());
                tokens = tokens.saturating_add(gate.entering.tokens());
            }
            if let Some(gate) = models.get_mut(&name) {
                gate.let_in(room, lines, tokens);
            }
        }
    }
}

impl ModelGate {
    /// `lines` with so many `tokens` were let in, of all models, and do not count at a worker yet.
    fn let_in(&mut self, room: SpareRoom, lines: u32, tokens: u64) {
        let mut allowance = Allowance::new(room, lines, tokens);
        while let Some(line) = self.waiting.front() {
            let Some(cost) = allowance.take(line.tokens) else {
                return;
            };
            if let Some(line) = self.waiting.pop_front() {
                // One that nobody waits for is dropped, and then not counted any more.
                let _ = line.wake.send(self.entering.enter(cost));
            }
        }
    }
}

/// What may be let in at one look. Pure.
#[derive(Debug)]
struct Allowance {
    requests: u32,
    tokens: u64,
    /// What one line counts for at most. How much of its prompt is cached is not known here, and a worker that is idle
    /// takes any prompt; so each worker that has room gets one line, however long.
    line_max: u64,
}

impl Allowance {
    /// `lines` with so many `tokens` were let in and do not count at a worker yet.
    fn new(room: SpareRoom, lines: u32, tokens: u64) -> Self {
        let each = room.prompt_tokens / u64::from(room.workers.max(1));
        Self {
            requests: room.requests.saturating_sub(lines),
            tokens: room.prompt_tokens.saturating_sub(tokens),
            line_max: each.max(1),
        }
    }

    /// Takes a line in whose prompt has about so many tokens, if there is room. Returns how many it counts for.
    fn take(&mut self, tokens: u64) -> Option<u64> {
        if self.requests == 0 || self.tokens == 0 {
            return None;
        }
        let cost = tokens.clamp(1, self.line_max);
        self.requests -= 1;
        self.tokens = self.tokens.saturating_sub(cost);
        Some(cost)
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;
    use crate::batches::line::LineEndpoint;
    use crate::batches::send::{LineRequest, SendFuture};

    fn room(requests: u32, prompt_tokens: u64, workers: u32) -> SpareRoom {
        SpareRoom {
            requests,
            prompt_tokens,
            workers,
        }
    }

    /// How many lines of so many tokens are let in.
    fn let_in(room: SpareRoom, entering: (u32, u64), tokens: u64) -> u32 {
        let (lines, of_them) = entering;
        let mut allowance = Allowance::new(room, lines, of_them);
        let mut count = 0;
        while allowance.take(tokens).is_some() {
            count += 1;
        }
        count
    }

    #[test]
    fn lines_are_let_in_by_slots_and_by_tokens() {
        let four = room(80, 4_800, 4);
        for (what, room, entering, tokens, expected) in [
            ("by slots", four, (0, 0), 10, 80),
            ("by tokens", four, (0, 0), 100, 48),
            ("one long line for each worker", four, (0, 0), 30_000, 4),
            ("empty prompts", room(3, 4_800, 4), (0, 0), 0, 3),
            ("some are entering", four, (50, 500), 10, 30),
            ("long ones are entering", four, (4, 4_800), 10, 0),
            ("no room", SpareRoom::default(), (0, 0), 10, 0),
            ("too little for one", room(5, 1, 1), (0, 0), 1_000, 1),
        ] {
            assert_eq!(let_in(room, entering, tokens), expected, "{what}");
        }
    }

    /// A fleet with this room for each model.
    #[derive(Debug)]
    struct Fleet(SpareRoom);

    impl SendLine for Fleet {
        fn send(&self, _: LineRequest) -> SendFuture<'_> {
            Box::pin(std::future::pending())
        }

        fn room(&self, _: &str) -> SpareRoom {
            self.0
        }

        fn refusal(&self, _: &str, _: &str, _: LineEndpoint) -> Option<(String, String)> {
            None
        }
    }

    #[test]
    fn lines_of_a_model_are_let_in_in_the_order_in_which_they_came() {
        let waiting = IntGauge::new("waiting", "waiting").unwrap();
        let gate = RoomGate::new(waiting.clone());
        let mut context = Context::from_waker(Waker::noop());
        let mut first = pin!(gate.enter("m", 10));
        let mut second = Box::pin(gate.enter("m", 10));
        let mut third = pin!(gate.enter("m", 10));
        assert!(first.as_mut().poll(&mut context).is_pending());
        assert!(second.as_mut().poll(&mut context).is_pending());
        assert!(third.as_mut().poll(&mut context).is_pending());
        assert_eq!(waiting.get(), 3);
        // Nobody waits for the second one any more.
        drop(second);
        gate.look(&Fleet(SpareRoom::default()));
        assert!(first.as_mut().poll(&mut context).is_pending());
        let one = Fleet(room(1, 1_000, 1));
        gate.look(&one);
        let Poll::Ready(Some(entered)) = first.as_mut().poll(&mut context) else {
            panic!("the first line was not let in");
        };
        assert!(third.as_mut().poll(&mut context).is_pending());
        // The first one counts until it is at a worker.
        gate.look(&one);
        assert!(third.as_mut().poll(&mut context).is_pending());
        drop(entered);
        gate.look(&one);
        assert!(third.as_mut().poll(&mut context).is_ready());
        assert_eq!(waiting.get(), 0);
    }

    #[test]
    fn what_enters_for_one_model_is_no_room_for_another_which_may_have_the_same_workers() {
        let gate = RoomGate::new(IntGauge::new("waiting", "waiting").unwrap());
        let mut context = Context::from_waker(Waker::noop());
        let mut one = pin!(gate.enter("m", 10));
        let mut other = pin!(gate.enter("n", 10));
        assert!(one.as_mut().poll(&mut context).is_pending());
        assert!(other.as_mut().poll(&mut context).is_pending());
        gate.look(&Fleet(room(1, 1_000, 1)));
        let one = one.as_mut().poll(&mut context);
        let other = other.as_mut().poll(&mut context);
        assert_ne!(one.is_ready(), other.is_ready());
    }
}
