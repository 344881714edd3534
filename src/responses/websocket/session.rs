//! The turns of one connection: which runs when, what it may continue, what it is refused. Pure.
//!
//! - Within a lane turns run one after the other, in the order of their frames. Turns of different lanes run side by
//!   side, at most [`TURNS_MAX`] at a time; those that wait start in the order of their frames.
//! - A turn that has started waits for the memory of its body. Until it has that, its body counts here; while such
//!   turns have too many bytes together, no other one starts.
//! - A lane remembers its latest response. A turn finds the response that it continues when it starts, in any lane, and
//!   keeps it: another turn may move its lane on meanwhile.
//! - A continuation that fails makes its own lane forget the response it named. A fork from another lane does not.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;

use super::client_frame::{ClientFrame, CreateFrame, Lane, Work, read};
use super::error_frame;
use super::memory::{Remembered, TurnEnd};
use super::step::{Bitten, Bounds, CloseReason, Step, Steps, Turn, TurnNumber};
use crate::ids::ResponseId;
use crate::openai::error::ApiError;

/// Turns that run at a time on one connection, as OpenAI has it.
pub const TURNS_MAX: usize = 16;
/// Lanes with a name that one connection may use, as OpenAI has it.
pub const LANES_MAX: usize = 32;

#[derive(Debug)]
struct LaneState {
    lane: Lane,
    is_running: bool,
    latest: Option<Latest>,
}

#[derive(Debug)]
struct Latest {
    response: Arc<Remembered>,
    bytes: u64,
    /// Rises with each response that any lane remembers.
    order: u64,
}

#[derive(Debug)]
struct Running {
    number: TurnNumber,
    lane: usize,
    /// The response that the client named.
    previous: Option<ResponseId>,
    /// The size of its body, until the memory of bodies counts that.
    starting_bytes: u64,
}

#[derive(Debug)]
struct Waiting {
    lane: usize,
    previous: Option<ResponseId>,
    work: Result<Work, Bytes>,
    bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Open,
    /// Too old for new turns.
    Expired,
    Draining,
    Closed,
}

/// See the module.
#[derive(Debug)]
pub struct Session {
    bounds: Bounds,
    phase: Phase,
    /// The lanes that the client has used.
    lanes: Vec<LaneState>,
    queue: VecDeque<Waiting>,
    queued_bytes: u64,
    running: Vec<Running>,
    /// Those of all running turns.
    starting_bytes: u64,
    turns: u64,
    order: u64,
    memory_bytes: u64,
    bitten: Bitten,
    /// The client has been answered that the connection is too old.
    is_age_reported: bool,
}

impl Session {
    pub fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            phase: Phase::Open,
            lanes: Vec::new(),
            queue: VecDeque::new(),
            queued_bytes: 0,
            running: Vec::new(),
            starting_bytes: 0,
            turns: 0,
            order: 0,
            memory_bytes: 0,
            bitten: Bitten::default(),
            is_age_reported: false,
        }
    }

    /// Bytes of what is remembered, and of what waits in the queue or for memory.
    pub fn bytes(&self) -> u64 {
        self.memory_bytes + self.queued_bytes + self.starting_bytes
    }

    pub fn is_busy(&self) -> bool {
        !self.running.is_empty() || !self.queue.is_empty()
    }

    /// What was refused or forgotten for a bound since the last call.
    pub fn take_bitten(&mut self) -> Bitten {
        std::mem::take(&mut self.bitten)
    }

    /// A text frame came. `room`: bytes that all connections together may still take.
    pub fn on_text(&mut self, text: &[u8], room: u64) -> Steps {
        let mut steps = Steps::new();
        if self.phase == Phase::Closed {
            return steps;
        }
        match read(text) {
            Ok(ClientFrame::Create(create)) => self.on_create(create, room, &mut steps),
            Ok(ClientFrame::Ignored) => {}
            Ok(ClientFrame::Answered(answer)) => steps.push(Step::Send(answer)),
            Err(error) => refuse(error, &Lane::DEFAULT, &mut steps),
        }
        steps
    }

    pub fn on_binary(&mut self) -> Steps {
        let mut steps = Steps::new();
        if self.phase != Phase::Closed {
            refuse(ApiError::binary_frame(), &Lane::DEFAULT, &mut steps);
        }
        steps
    }

    fn on_create(&mut self, create: CreateFrame, room: u64, steps: &mut Steps) {
        let CreateFrame {
            lane,
            previous,
            work,
        } = create;
        match self.phase {
            Phase::Open => {}
            Phase::Expired => return self.report_age(steps),
            Phase::Draining | Phase::Closed => return refuse(ApiError::stopping(), &lane, steps),
        }
        let Some(index) = self.lane(&lane) else {
            self.bitten.lanes += 1;
            return refuse(ApiError::too_many_streams(LANES_MAX), &lane, steps);
        };
        let bytes = work.as_ref().map_or(0, |work| work.body.len() as u64);
        let starts_now =
            !self.lanes[index].is_running && self.may_start(bytes) && self.next_ready().is_none();
        let is_full = self.queue.len() >= self.bounds.queued_turns
            || self.queued_bytes + bytes > self.bounds.queued_bytes
            || bytes > room;
        if !starts_now && is_full {
            // It never came into its lane, so the lane remembers what it did.
            self.bitten.queue += 1;
            return refuse(ApiError::too_many_queued(), &lane, steps);
        }
        self.queued_bytes += bytes;
        self.queue.push_back(Waiting {
            lane: index,
            previous,
            work: work.map_err(|error| error_frame::of_error(error, &lane)),
            bytes,
        });
        self.start_ready(steps);
    }

    /// The lane's index; `None` if it would be one too many.
    fn lane(&mut self, lane: &Lane) -> Option<usize> {
        if let Some(index) = self.lanes.iter().position(|state| state.lane == *lane) {
            return Some(index);
        }
        let named = self
            .lanes
            .iter()
            .filter(|state| state.lane.name().is_some());
        if lane.name().is_some() && named.count() >= LANES_MAX {
            return None;
        }
        self.lanes.push(LaneState {
            lane: lane.clone(),
            is_running: false,
            latest: None,
        });
        Some(self.lanes.len() - 1)
    }

    /// Where the first turn of the queue is whose lane is free.
    fn next_ready(&self) -> Option<usize> {
        let mut queue = self.queue.iter();
        queue.position(|waiting| !self.lanes[waiting.lane].is_running)
    }

    /// Whether a turn with a body of this size may start beside those that run.
    fn may_start(&self, bytes: u64) -> bool {
        let fits = self.starting_bytes == 0
            || self.starting_bytes.saturating_add(bytes) <= self.bounds.starting_bytes;
        fits && self.running.len() < TURNS_MAX
    }

    /// Starts the turns that may run, oldest frame first.
    fn start_ready(&mut self, steps: &mut Steps) {
        while let Some(next) = self.next_ready() {
            // A smaller one does not pass it: it could be passed for ever.
            if !self.may_start(self.queue[next].bytes) {
                return;
            }
            let Some(waiting) = self.queue.remove(next) else {
                return;
            };
            self.queued_bytes -= waiting.bytes;
            let work = match waiting.work {
                Ok(work) => work,
                Err(frame) => {
                    steps.push(Step::Send(frame));
                    self.forget(waiting.lane, waiting.previous);
                    continue;
                }
            };
            self.starting_bytes += waiting.bytes;
            self.turns += 1;
            let number = TurnNumber(self.turns);
            let continued = waiting.previous.and_then(|id| self.find(id));
            self.lanes[waiting.lane].is_running = true;
            steps.push(Step::Start(Turn {
                number,
                lane: self.lanes[waiting.lane].lane.clone(),
                work,
                continued,
            }));
            self.running.push(Running {
                number,
                lane: waiting.lane,
                previous: waiting.previous,
                starting_bytes: waiting.bytes,
            });
        }
    }

    /// The memory of bodies counts the body of a turn from now on.
    pub fn on_counted(&mut self, number: TurnNumber) -> Steps {
        let mut steps = Steps::new();
        let mut running = self.running.iter_mut();
        if let Some(turn) = running.find(|turn| turn.number == number) {
            self.starting_bytes -= std::mem::take(&mut turn.starting_bytes);
            self.start_ready(&mut steps);
        }
        steps
    }

    fn find(&self, id: ResponseId) -> Option<Arc<Remembered>> {
        let latest = self.lanes.iter().filter_map(|lane| lane.latest.as_ref());
        let mut found = latest.filter(|latest| latest.response.id == id);
        found.next().map(|latest| latest.response.clone())
    }

    /// The lane forgets the response that a failed turn of its own named.
    fn forget(&mut self, lane: usize, previous: Option<ResponseId>) {
        let Some(id) = previous else {
            return;
        };
        let lane = &mut self.lanes[lane];
        if lane
            .latest
            .as_ref()
            .is_some_and(|latest| latest.response.id == id)
        {
            let forgotten = lane.latest.take();
            self.memory_bytes -= forgotten.map_or(0, |latest| latest.bytes);
        }
    }

    /// A turn ended. `room`: bytes that all connections together may still take.
    pub fn on_end(&mut self, number: TurnNumber, end: TurnEnd, room: u64) -> Steps {
        let mut steps = Steps::new();
        let mut running = self.running.iter();
        let Some(index) = running.position(|running| running.number == number) else {
            return steps;
        };
        let running = self.running.remove(index);
        self.starting_bytes -= running.starting_bytes;
        self.lanes[running.lane].is_running = false;
        match end {
            TurnEnd::Failed => self.forget(running.lane, running.previous),
            TurnEnd::Ended(response) => self.remember(running.lane, response, room),
        }
        self.start_ready(&mut steps);
        self.close_if_done(&mut steps);
        steps
    }

    /// Replaces what the lane remembers, and forgets the oldest responses until the rest fits.
    fn remember(&mut self, lane: usize, response: Option<Arc<Remembered>>, room: u64) {
        let max = (self.memory_bytes.saturating_add(room)).min(self.bounds.memory_bytes);
        self.order += 1;
        let order = self.order;
        let latest = response.map(|response| Latest {
            bytes: response.bytes(),
            response,
            order,
        });
        self.memory_bytes += latest.as_ref().map_or(0, |latest| latest.bytes);
        let before = std::mem::replace(&mut self.lanes[lane].latest, latest);
        self.memory_bytes -= before.map_or(0, |latest| latest.bytes);
        while self.memory_bytes > max {
            let remembered = self.lanes.iter_mut().filter(|lane| lane.latest.is_some());
            let oldest =
                remembered.min_by_key(|lane| lane.latest.as_ref().map(|latest| latest.order));
            let Some(forgotten) = oldest.and_then(|lane| lane.latest.take()) else {
                return;
            };
            self.memory_bytes -= forgotten.bytes;
            self.bitten.memory += 1;
        }
    }

    /// The connection is as old as it may be.
    pub fn on_expired(&mut self) -> Steps {
        let mut steps = Steps::new();
        if self.phase == Phase::Open {
            self.phase = Phase::Expired;
            self.close_if_done(&mut steps);
        }
        steps
    }

    /// The router stops: what runs ends, what waits does not start.
    pub fn on_drain(&mut self) -> Steps {
        let mut steps = Steps::new();
        if matches!(self.phase, Phase::Draining | Phase::Closed) {
            return steps;
        }
        self.phase = Phase::Draining;
        self.queued_bytes = 0;
        for waiting in self.queue.drain(..) {
            let lane = &self.lanes[waiting.lane].lane;
            let frame = waiting.work.err();
            let frame = frame.unwrap_or_else(|| error_frame::of_error(ApiError::stopping(), lane));
            steps.push(Step::Send(frame));
        }
        self.close_if_done(&mut steps);
        steps
    }

    /// No turn came for too long.
    pub fn on_idle(&mut self) -> Steps {
        let mut steps = Steps::new();
        if self.phase != Phase::Closed && !self.is_busy() {
            self.phase = Phase::Closed;
            steps.push(Step::Close(CloseReason::Over));
        }
        steps
    }

    fn close_if_done(&mut self, steps: &mut Steps) {
        if self.is_busy() {
            return;
        }
        match self.phase {
            Phase::Open | Phase::Closed => return,
            Phase::Expired => {
                // A client that sends its next turn just now finds out why it is not answered.
                if !self.is_age_reported {
                    self.report_age(steps);
                }
                steps.push(Step::Close(CloseReason::Over));
            }
            Phase::Draining => steps.push(Step::Close(CloseReason::Draining)),
        }
        self.phase = Phase::Closed;
    }

    fn report_age(&mut self, steps: &mut Steps) {
        self.is_age_reported = true;
        let error = ApiError::old_connection(self.bounds.age_minutes);
        refuse(error, &Lane::DEFAULT, steps);
    }
}

fn refuse(error: ApiError, lane: &Lane, steps: &mut Steps) {
    steps.push(Step::Send(error_frame::of_error(error, lane)));
}

#[cfg(test)]
mod tests;
