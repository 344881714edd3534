//! The queue of the models that share workers, as the I/O threads share it: entering, leaving, and being released.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::time::Instant;

use parking_lot::Mutex;
use rustc_hash::{FxHashMap, FxHashSet};
use tokio::sync::oneshot;

use super::grant::{Grant, Granted, Promises, Release};
use crate::fleet::Group;
use crate::fleet::freed::Freed;
use crate::fleet::waiting::{DueTime, WaitingByOwner};
use crate::ids::{Model, WorkerId};
use crate::queue::{
    Below, ClassStatus, Entered, EntryId, InLine, Left, LetFirst, Look, Outcome, Patience,
    PlaceInLine, Queue, Refusal, Request, Room, Settings, Stretch, Timing,
};
use crate::relay::choose::chosen::Chosen;
use crate::relay::choose::promised::Promised;

/// Where a waiting request would be sent now.
pub(in crate::relay) struct Placed {
    pub(in crate::relay) group: Arc<Group>,
    pub(in crate::relay) chosen: Chosen,
    pub(in crate::relay) promises: Promises,
}

/// The walk over those who wait behind the first ones, which takes several looks at the queue.
#[derive(Debug, Default)]
pub(super) struct Behind {
    /// What those promise whom it has passed.
    pub(super) promised: Promised,
    pub(super) began: Option<Instant>,
}

/// Looks where a waiting request would be sent now, behind what workers were promised, and without some of them.
pub(in crate::relay) type Placing =
    Box<dyn Fn(Instant, &Promised, &[WorkerId]) -> Option<Placed> + Send + Sync>;

/// A request with a plan, as it enters a queue.
pub(in crate::relay) struct Planned {
    pub(in crate::relay) placing: Placing,
    /// `None` if no worker would take it now.
    pub(in crate::relay) waits_for: Option<WaitsFor>,
}

/// A waiting request to the task that releases it.
pub(super) struct Waiter {
    pub(super) model: Model,
    /// Prompt tokens to compute, as far as they are known.
    pub(super) tokens: u64,
    /// `None` for one whose model had no workers when it came: it plans anew.
    pub(super) placing: Option<Placing>,
    /// `None` before it was first seen to wait for a worker.
    pub(super) waits_for: RefCell<Option<WaitsFor>>,
    /// The line of the worker that `waits_for` names.
    place: Cell<Option<PlaceInLine>>,
    /// With requests of other replicas that go first.
    pub(super) patience: Patience,
    wake: oneshot::Sender<Woken>,
}

/// What becomes of a waiting request that is looked at.
pub(super) enum Looked {
    /// It takes this with it, if its worker is known.
    Send(Option<Release>),
    Wait(WaitsFor),
    Other(Look),
}

/// The worker for whose room a request was last seen to wait.
pub(in crate::relay) struct WaitsFor {
    /// When it was looked at, or chose its worker before it entered.
    pub(in crate::relay) at: Instant,
    pub(in crate::relay) worker: WorkerId,
    pub(in crate::relay) promises: Promises,
}

impl fmt::Debug for Waiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waiter")
            .field("model", &self.model)
            .finish_non_exhaustive()
    }
}

/// How a waiting request learns that its wait in this queue is over.
pub(super) enum Woken {
    Granted(Grant),
    Refused(Refusal),
    /// It waits on in another queue.
    Moved {
        planned: Option<Planned>,
        request: Request,
    },
}

#[derive(Debug)]
pub(in crate::relay) struct SharedQueue {
    /// The first of the models.
    pub(super) name: Model,
    /// Requests that wait, to be read without the lock.
    waiting: AtomicU32,
    /// Whether each of them was promised to a worker when workers were last looked at.
    is_all_promised: AtomicBool,
    /// The walk over those who wait behind the first ones.
    pub(super) behind: Mutex<Behind>,
    /// The first ones in other replicas' lines that are let go first.
    pub(super) let_first: Mutex<LetFirst>,
    /// There may be other replicas.
    is_shared: bool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    queue: Queue<Waiter>,
    /// How many wait, for each model that any waits for.
    models: FxHashMap<Model, u32>,
    /// What all of them promise, each to the worker for which it was last seen to wait.
    promised: Promised,
    /// All of them, each where `promised` has it. Empty if there are no other replicas.
    in_line: InLine,
    /// The models whose requests wait for a worker, as the queue has it. `None`: it may have one wrong.
    without_workers: Option<FxHashSet<Model>>,
    settings: Arc<Settings>,
    /// Removed from the queues: nothing may enter any more.
    is_closed: bool,
}

/// A request in the queue. Dropped, it leaves.
pub(super) struct Ticket {
    queue: Arc<SharedQueue>,
    freed: Arc<Freed>,
    id: EntryId,
    woken: oneshot::Receiver<Woken>,
    is_over: bool,
}

impl Ticket {
    pub(super) async fn woken(mut self) -> Woken {
        let woken = (&mut self.woken).await;
        self.is_over = true;
        // The sender is dropped with the queue, when the router ends.
        woken.unwrap_or(Woken::Refused(Refusal::DRAINING))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let mut state = self.queue.state.lock();
        if let Some(waiter) = state.queue.leave(self.id) {
            state.on_left(&waiter);
            self.queue.count(&state);
            self.freed.remove_waiting(1);
        }
    }
}

/// A request that has left, with the name of its class.
pub(super) struct Gone {
    pub(super) left: Left<Waiter>,
    pub(super) class: String,
    /// `None` unless it was released by a look.
    pub(super) release: Option<Release>,
}

impl SharedQueue {
    /// `is_shared`: there may be other replicas.
    pub(super) fn new(name: Model, settings: Arc<Settings>, is_shared: bool) -> Self {
        Self {
            name,
            waiting: AtomicU32::new(0),
            is_all_promised: AtomicBool::new(true),
            behind: Mutex::default(),
            let_first: Mutex::default(),
            is_shared,
            state: Mutex::new(State {
                queue: Queue::new(settings.clone()),
                models: FxHashMap::default(),
                promised: Promised::default(),
                in_line: InLine::default(),
                without_workers: None,
                settings,
                is_closed: false,
            }),
        }
    }

    pub(in crate::relay) fn waiting(&self) -> u32 {
        self.waiting.load(Relaxed)
    }

    /// Whether each of them was promised to a worker when workers were last looked at.
    pub(super) fn is_all_promised(&self) -> bool {
        self.is_all_promised.load(Relaxed)
    }

    pub(super) fn set_settings(&self, settings: &Arc<Settings>) {
        let mut state = self.state.lock();
        state.queue.set_settings(settings.clone());
        state.settings = settings.clone();
    }

    /// Whether a request with a plan may pass those in its line: they wait beside it, so that another replica sends its
    /// request first, which one with a target by these `settings` does not. Takes no lock for any other request.
    pub(super) fn is_passed_by(
        &self,
        settings: &Settings,
        request: &Request,
        planned: &Planned,
    ) -> bool {
        if !self.is_shared || !settings.has_target(request) {
            return false;
        }
        let waits_for = planned.waits_for.as_ref();
        let Some((owner, _)) = waits_for.and_then(|waits_for| waits_for.promises.first()) else {
            return false;
        };
        // A walk holds it to its end.
        self.let_first.lock().is_waited_in(*owner)
    }

    /// Adds a request, with who had to leave for it. `None` if the queue is closed; then `planned` stays.
    pub(super) fn enter(
        self: &Arc<Self>,
        freed: &Arc<Freed>,
        now: Instant,
        room: Room,
        request: Request,
        model: &Model,
        planned: &mut Option<Planned>,
    ) -> Option<Result<(Ticket, Vec<Gone>), Refusal>> {
        let mut state = self.state.lock();
        if state.is_closed {
            return None;
        }
        let lacks_worker = |models: &FxHashSet<Model>| models.contains(model);
        if state.without_workers.as_ref().map(lacks_worker) != Some(request.lacks_worker) {
            state.without_workers = None;
        }
        let (wake, woken) = oneshot::channel();
        let (placing, waits_for) = match planned.take() {
            Some(planned) => (Some(planned.placing), planned.waits_for),
            None => (None, None),
        };
        let promises = match &waits_for {
            Some(waits_for) => waits_for.promises.clone(),
            None => Promises::new(),
        };
        let place = place_of(self.is_shared, &promises, state.queue.due(&request));
        let waiter = Waiter {
            model: model.clone(),
            tokens: request.tokens,
            placing,
            waits_for: RefCell::new(waits_for),
            place: Cell::new(place),
            patience: Patience::new(request.has_room),
            wake,
        };
        let Entered { id, left } = match state.queue.enter(now, room, request, waiter) {
            Ok(entered) => entered,
            Err((refusal, _)) => return Some(Err(refusal)),
        };
        *state.models.entry(model.clone()).or_default() += 1;
        state.promised.add_waiting(&promises);
        if let Some(place) = place {
            state.in_line.add(place);
        }
        self.is_all_promised.store(false, Relaxed);
        self.count(&state);
        let gone = state.named(left);
        drop(state);
        // The worker that had room meanwhile did not know of this request.
        freed.add_waiting(1);
        let ticket = Ticket {
            queue: self.clone(),
            freed: freed.clone(),
            id,
            woken,
            is_over: false,
        };
        Some(Ok((ticket, gone)))
    }

    /// Takes note of the models none of whose workers takes requests.
    pub(super) fn set_without_workers(&self, now: Instant, models: FxHashSet<Model>) {
        let mut state = self.state.lock();
        if state.without_workers.as_ref() == Some(&models) {
            return;
        }
        let lacks_worker = |waiter: &Waiter| models.contains(&waiter.model);
        state.queue.set_lacks_worker(now, lacks_worker);
        state.without_workers = Some(models);
    }

    /// The requests that are released or refused now. Who waits for one learns it by [`Gone::wake`], without the lock.
    /// `look` also says what a request that is sent takes with it; it gets the lines of those that were not sent so
    /// far.
    pub(super) fn advance(
        &self,
        now: Instant,
        room: Room,
        computed: u64,
        mut look: impl FnMut(&Waiter, Timing, Stretch, &InLine) -> Looked,
    ) -> Vec<Gone> {
        let mut state = self.state.lock();
        let mut releases = Vec::new();
        let State {
            queue,
            promised,
            in_line,
            ..
        } = &mut *state;
        let left = queue.advance(now, room, computed, |waiter, timing, stretch| {
            match look(waiter, timing, stretch, in_line) {
                Looked::Send(release) => {
                    in_line.move_to(&waiter.place, None);
                    releases.push(release);
                    Look::Send
                }
                Looked::Wait(waits_for) => {
                    let place = place_of(self.is_shared, &waits_for.promises, timing.due);
                    in_line.move_to(&waiter.place, place);
                    promised.add_waiting(&waits_for.promises);
                    if let Some(before) = waiter.waits_for.replace(Some(waits_for)) {
                        promised.remove_waiting(&before.promises);
                    }
                    Look::Wait
                }
                Looked::Other(look) => look,
            }
        });
        let is_all = queue.is_all_looked_at;
        self.is_all_promised.store(is_all, Relaxed);
        self.count(&state);
        let mut gone = state.named(left);
        drop(state);
        let mut releases = releases.into_iter();
        for gone in &mut gone {
            if gone.left.outcome == Outcome::Released {
                gone.release = releases.next().flatten();
            }
        }
        gone
    }

    /// Adds what those promise who wait, each to the worker for which it was last seen to wait.
    pub(super) fn add_waiting(&self, promised: &mut Promised) {
        promised.add_all(&self.state.lock().promised);
    }

    /// Adds the first one of each line of some workers.
    pub(super) fn add_first(
        &self,
        waiting: &mut WaitingByOwner,
        is_meant: impl Fn(WorkerId) -> bool,
    ) {
        self.state.lock().in_line.add_first(waiting, is_meant);
    }

    /// The waiting requests of lower classes than that of `priority`, without background requests.
    pub(super) fn below(&self, priority: i32) -> Vec<Below> {
        self.state.lock().queue.below(priority)
    }

    /// Refuses a request whose memory is needed.
    pub(super) fn give_up(&self, now: Instant, id: EntryId) -> Option<Gone> {
        let mut state = self.state.lock();
        let left = state.queue.give_up(now, id)?;
        self.count(&state);
        state.named(vec![left]).pop()
    }

    /// Ends the waits of requests for some models.
    pub(super) fn end(
        &self,
        now: Instant,
        outcome: Outcome,
        is_ended: impl Fn(&Model) -> bool,
    ) -> Vec<Gone> {
        let mut state = self.state.lock();
        let is_ended = |waiter: &Waiter| is_ended(&waiter.model);
        let left = state.queue.end(now, outcome, is_ended);
        self.count(&state);
        state.named(left)
    }

    /// The models of those who wait.
    pub(super) fn models(&self) -> Vec<Model> {
        self.state.lock().models.keys().cloned().collect()
    }

    /// Closes the queue, unless requests wait in it.
    pub(super) fn close_if_empty(&self) -> bool {
        let mut state = self.state.lock();
        state.is_closed |= state.queue.is_empty();
        state.is_closed
    }

    /// The classes of each model that waits, with their names.
    pub(super) fn status(&self, now: Instant) -> Vec<(Model, Vec<(String, ClassStatus)>)> {
        let state = self.state.lock();
        let models = state.queue.classes(now, |waiter| &waiter.model);
        let models = models.into_iter().map(|(model, classes)| {
            let named = classes.into_iter();
            let named = named.map(|status| (state.name_of(status.class), status));
            (model.clone(), named.collect())
        });
        models.collect()
    }

    /// The measured tokens a second and worker.
    pub(super) fn measured_rate(&self) -> Option<f64> {
        self.state.lock().queue.measured_rate()
    }

    fn count(&self, state: &State) {
        self.waiting.store(state.queue.len() as u32, Relaxed);
    }
}

#[cfg(test)]
impl SharedQueue {
    pub(super) fn settings(&self) -> Arc<Settings> {
        self.state.lock().settings.clone()
    }
}

impl State {
    fn name_of(&self, class: usize) -> String {
        let class = self.settings.classes.get(class);
        class.map_or_else(String::new, |class| class.name.clone())
    }

    fn on_left(&mut self, waiter: &Waiter) {
        if let Some(waits_for) = &*waiter.waits_for.borrow() {
            self.promised.remove_waiting(&waits_for.promises);
        }
        self.in_line.move_to(&waiter.place, None);
        if let Some(waiting) = self.models.get_mut(&waiter.model) {
            *waiting -= 1;
            if *waiting == 0 {
                self.models.remove(&waiter.model);
            }
        }
    }

    /// Those who have left the queue just now.
    fn named(&mut self, left: Vec<Left<Waiter>>) -> Vec<Gone> {
        for gone in &left {
            self.on_left(&gone.waker);
        }
        let gone = left.into_iter().map(|left| Gone {
            class: self.name_of(left.class),
            left,
            release: None,
        });
        gone.collect()
    }
}

/// The line of a request that promises this: that of the worker which computes its prompt. Without other replicas
/// nobody reads the lines.
fn place_of(is_shared: bool, promises: &Promises, due: DueTime) -> Option<PlaceInLine> {
    let (owner, _) = promises.first().filter(|_| is_shared)?;
    Some((*owner, due))
}

impl Gone {
    /// Wakes the request with how it left.
    pub(super) fn wake(self, granted: &Arc<Granted>, freed: &Arc<Freed>) {
        let request = self.left.request;
        let Waiter {
            placing,
            waits_for,
            wake,
            ..
        } = self.left.waker;
        let woken = match self.left.outcome {
            Outcome::Released => {
                let release = self.release.unwrap_or_default();
                let has_lost_target = request.has_lost_target;
                Woken::Granted(Grant::new(granted, freed, release, has_lost_target))
            }
            Outcome::Refused(refusal) => {
                freed.remove_waiting(1);
                Woken::Refused(refusal)
            }
            Outcome::Moved => {
                freed.remove_waiting(1);
                let waits_for = waits_for.into_inner();
                let planned = placing.map(|placing| Planned { placing, waits_for });
                // If its client has disconnected meanwhile, it is dropped.
                let _ = wake.send(Woken::Moved { planned, request });
                return;
            }
        };
        // The request takes back what it lent for the looks.
        drop(placing);
        let _ = wake.send(woken);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::fleet::load::LoadShare;
    use crate::observe;

    #[test]
    fn a_request_is_in_a_line_only_where_another_replica_may_hear_of_it() {
        let worker = WorkerId(3);
        let promises = Promises::from_iter([(worker, LoadShare::of_request(10, 10))]);
        let due = DueTime {
            priority: 0,
            at: observe::now(),
        };
        assert_eq!(place_of(true, &promises, due), Some((worker, due)));
        assert_eq!(place_of(false, &promises, due), None);
        assert_eq!(place_of(true, &Promises::new(), due), None);
    }

    /// Else this test would wait for ever.
    #[test]
    fn without_a_target_or_other_replicas_a_request_waits_for_no_walk_to_know_whom_it_may_pass() {
        let settings = Arc::new(Settings::default());
        let (now, worker) = (observe::now(), WorkerId(3));
        for (is_shared, target) in [(true, 0), (false, 1)] {
            let queue = SharedQueue::new(Model::from("a"), settings.clone(), is_shared);
            // A walk holds both.
            let _walk = (queue.let_first.lock(), queue.state.lock());
            let request = Request {
                ttft_target: Some(Duration::from_secs(target)),
                ..Request::for_tests(now, 10)
            };
            let planned = Planned {
                placing: Box::new(|_, _, _| None),
                waits_for: Some(WaitsFor {
                    at: now,
                    worker,
                    promises: Promises::from_iter([(worker, LoadShare::of_request(10, 10))]),
                }),
            };
            assert!(!queue.is_passed_by(&settings, &request, &planned));
        }
    }

    #[test]
    fn a_model_counts_as_long_as_one_of_its_requests_waits() {
        let settings = Arc::new(Settings::default());
        let queue = Arc::new(SharedQueue::new(Model::from("a"), settings, false));
        let freed: Arc<Freed> = Arc::default();
        let now = observe::now();
        let room = Room {
            workers: 1,
            is_full: true,
            ..Room::default()
        };
        let request = Request {
            deadline: now + Duration::from_secs(60),
            ..Request::for_tests(now, 10)
        };
        let enter = |model: &str| {
            let model = Model::from(model);
            let entered = queue.enter(&freed, now, room, request, &model, &mut None);
            let (ticket, _) = entered.unwrap().unwrap();
            ticket
        };
        let models = || {
            let mut names: Vec<String> = queue.models().iter().map(Model::to_string).collect();
            names.sort_unstable();
            names
        };
        let (first, other, _last) = (enter("a"), enter("b"), enter("a"));
        drop(first);
        assert_eq!(models(), ["a", "b"]);
        drop(other);
        assert_eq!(models(), ["a"]);
        assert_eq!(queue.end(now, Outcome::Released, |_| true).len(), 1);
        assert!(models().is_empty());
    }
}
