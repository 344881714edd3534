//! Where lines of batches wait until the fleet has room that no interactive request wants. They are let in in the order
//! in which they came, as many at each look as there is room for their model. Lines that run give way where interactive
//! requests want their places: they are given up, and wait here again before the others.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use prometheus::IntGauge;
use tokio::sync::{Notify, oneshot};

use super::send::SendLine;
use crate::observe::metrics::Counted;
use crate::relay::{EnteringLine, EnteringLines, LinesByWorker, RunningLines, SpareRoom};

/// Time between two looks, about a step of an engine. A worker that becomes idle is idle for half of it on average, and
/// as long an interactive request waits for a line to give way.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// Lines that wait. Each shard that runs here has a bounded number of them.
#[derive(Debug)]
pub struct RoomGate {
    models: Mutex<BTreeMap<Arc<str>, ModelGate>>,
    running: Arc<RunningLines>,
    arrived: Notify,
    waiting: IntGauge,
}

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

impl RoomGate {
    /// `waiting`: shows how many wait.
    pub fn new(waiting: IntGauge) -> Self {
        Self {
            models: Mutex::default(),
            running: Arc::default(),
            arrived: Notify::new(),
            waiting,
        }
    }

    /// Waits until a line for the model may be sent: before all others of the model if it `gave_way`, for what it has of
    /// its prompt may still be cached. `None`: the gate has gone, because the router ends.
    pub async fn enter(&self, model: &str, tokens: u64, gave_way: bool) -> Option<EnteringLine> {
        let (wake, woken) = oneshot::channel();
        let _count = Counted::new(&self.waiting);
        self.push(model, WaitingLine { tokens, wake }, gave_way);
        self.arrived.notify_one();
        woken.await.ok()
    }

    /// Lets lines in, and asks them to give way, for as long as this is polled.
    pub async fn run(&self, sender: &dyn SendLine) {
        loop {
            // Before those that run: a line that comes to a worker meanwhile is one of these.
            let is_empty = self.is_empty();
            let lines = self.running.counts();
            if is_empty && lines.is_empty() {
                self.arrived.notified().await;
            }
            if !lines.is_empty() {
                self.make_way(sender, &lines);
            }
            self.look(sender, &lines);
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }

    fn push(&self, model: &str, line: WaitingLine, is_first: bool) {
        let mut models = self.models.lock();
        let gate = match models.get_mut(model) {
            Some(gate) => gate,
            None => models.entry(model.into()).or_default(),
        };
        if is_first {
            gate.waiting.push_front(line);
        } else {
            gate.waiting.push_back(line);
        }
    }

    /// Whether no line waits or is on its way to a worker.
    fn is_empty(&self) -> bool {
        let models = self.models.lock();
        let mut gates = models.values();
        gates.all(|gate| gate.waiting.is_empty() && gate.entering.lines() == 0)
    }

    /// Asks lines to give way where their places are wanted.
    fn make_way(&self, sender: &dyn SendLine, lines: &LinesByWorker) {
        let (entering, _) = entering(&self.models.lock());
        for (worker, count) in sender.to_give_way(lines, entering) {
            self.running.ask(worker, count);
        }
    }

    /// Lets in what there is room for now.
    fn look(&self, sender: &dyn SendLine, lines: &LinesByWorker) {
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
            let room = sender.room(&name, lines);
            let mut models = self.models.lock();
            // Models may share workers: adapters, aliases. So what enters for one is no room for another.
            let entering = entering(&models);
            if let Some(gate) = models.get_mut(&name) {
                gate.let_in(room, entering, &self.running);
            }
        }
    }
}

impl ModelGate {
    /// `entering`: lines of all models that were let in and do not count at a worker yet, and their tokens.
    fn let_in(&mut self, room: SpareRoom, entering: (u32, u64), running: &Arc<RunningLines>) {
        let (lines, tokens) = entering;
        let mut allowance = Allowance::new(room, lines, tokens);
        while let Some(line) = self.waiting.front() {
            let Some(cost) = allowance.take(line.tokens) else {
                return;
            };
            if let Some(line) = self.waiting.pop_front() {
                // One that nobody waits for is dropped, and then not counted any more.
                let _ = line.wake.send(self.entering.enter(cost, running.clone()));
            }
        }
    }
}

/// The lines of all models that were let in and do not count at a worker yet, and their tokens.
fn entering(models: &BTreeMap<Arc<str>, ModelGate>) -> (u32, u64) {
    let entering = models.values().map(|gate| &gate.entering);
    entering.fold((0, 0), |(lines, tokens), of| {
        (
            lines.saturating_add(of.lines()),
            tokens.saturating_add(of.tokens()),
        )
    })
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
    use crate::ids::WorkerId;
    use crate::relay::BatchLine;

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

    /// A fleet with this room for each model, where so many lines are to give way.
    #[derive(Debug)]
    struct Fleet(SpareRoom, Vec<(WorkerId, u32)>);

    impl Fleet {
        fn look(&self, gate: &RoomGate) {
            gate.look(self, &gate.running.counts());
        }
    }

    impl SendLine for Fleet {
        fn send(&self, _: LineRequest) -> SendFuture<'_> {
            Box::pin(std::future::pending())
        }

        fn room(&self, _: &str, _: &LinesByWorker) -> SpareRoom {
            self.0
        }

        fn to_give_way(&self, _: &LinesByWorker, _: u32) -> Vec<(WorkerId, u32)> {
            self.1.clone()
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
        let mut first = pin!(gate.enter("m", 10, false));
        let mut second = Box::pin(gate.enter("m", 10, false));
        let mut third = pin!(gate.enter("m", 10, false));
        assert!(first.as_mut().poll(&mut context).is_pending());
        assert!(second.as_mut().poll(&mut context).is_pending());
        assert!(third.as_mut().poll(&mut context).is_pending());
        assert_eq!(waiting.get(), 3);
        // Nobody waits for the second one any more.
        drop(second);
        Fleet(SpareRoom::default(), Vec::new()).look(&gate);
        assert!(first.as_mut().poll(&mut context).is_pending());
        let one = Fleet(room(1, 1_000, 1), Vec::new());
        one.look(&gate);
        let Poll::Ready(Some(entered)) = first.as_mut().poll(&mut context) else {
            panic!("the first line was not let in");
        };
        assert!(third.as_mut().poll(&mut context).is_pending());
        // The first one counts until it is at a worker.
        one.look(&gate);
        assert!(third.as_mut().poll(&mut context).is_pending());
        drop(entered);
        one.look(&gate);
        assert!(third.as_mut().poll(&mut context).is_ready());
        assert_eq!(waiting.get(), 0);
    }

    #[test]
    fn what_enters_for_one_model_is_no_room_for_another_which_may_have_the_same_workers() {
        let gate = RoomGate::new(IntGauge::new("waiting", "waiting").unwrap());
        let mut context = Context::from_waker(Waker::noop());
        let mut one = pin!(gate.enter("m", 10, false));
        let mut other = pin!(gate.enter("n", 10, false));
        assert!(one.as_mut().poll(&mut context).is_pending());
        assert!(other.as_mut().poll(&mut context).is_pending());
        Fleet(room(1, 1_000, 1), Vec::new()).look(&gate);
        let one = one.as_mut().poll(&mut context);
        let other = other.as_mut().poll(&mut context);
        assert_ne!(one.is_ready(), other.is_ready());
    }

    #[test]
    fn a_line_that_gave_way_is_let_in_before_the_others() {
        let gate = RoomGate::new(IntGauge::new("waiting", "waiting").unwrap());
        let mut context = Context::from_waker(Waker::noop());
        let mut other = pin!(gate.enter("m", 10, false));
        let mut first = pin!(gate.enter("m", 10, true));
        assert!(other.as_mut().poll(&mut context).is_pending());
        assert!(first.as_mut().poll(&mut context).is_pending());
        Fleet(room(1, 1_000, 1), Vec::new()).look(&gate);
        assert!(other.as_mut().poll(&mut context).is_pending());
        assert!(first.as_mut().poll(&mut context).is_ready());
    }

    #[test]
    fn lines_give_way_where_their_places_are_wanted() {
        let (here, there) = (WorkerId(1), WorkerId(2));
        let gate = RoomGate::new(IntGauge::new("waiting", "waiting").unwrap());
        let entering = Arc::<EnteringLines>::default();
        let lines = [here, here, there].map(|worker| {
            let entering = entering.enter(10, gate.running.clone());
            let gives_way = entering.gives_way();
            let line = BatchLine::new("batch_1".into(), entering);
            line.count_at(worker);
            (line, gives_way)
        });
        let full = Fleet(SpareRoom::default(), vec![(here, 1)]);
        gate.make_way(&full, &gate.running.counts());
        let gives_way = lines.iter().map(|(_, gives_way)| gives_way.is_cancelled());
        assert!(gives_way.eq([false, true, false]));
    }
}
