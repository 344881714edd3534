//! What a background response says: its events, and its end in each of the ways it may end. Pure but for
//! the date.

use bytes::Bytes;

use crate::observe;
use crate::openai::error::ApiError;
use crate::responses::background::course::Course;
use crate::responses::background::log::{self, Log};
use crate::responses::events::{Events, Limits};
use crate::responses::finish::{Composed, Finish};
use crate::responses::object::{Outcome, Shape};
use crate::responses::sealing::Sealer;
use crate::store::record::Content;
use crate::store::{Amend, Batch, Final, Hint, Token};

/// It ends each reader's stream, and is no event.
const MARK: &[u8] = b"data: [DONE]\n\n";
const TOO_LARGE: &str = "The response is larger than the store allows.";

pub(super) struct Words {
    shape: Shape,
    limits: Limits,
    sealer: Option<Sealer>,
    events: Events,
    is_announced: bool,
}

/// How it ended, to be stored.
pub(super) struct End {
    token: Token,
    pub(super) outcome: Outcome,
    response: Bytes,
    cut: Bytes,
}

impl Words {
    pub(super) fn new(shape: Shape, limits: Limits, sealer: Option<Sealer>) -> Self {
        let events = Events::new(shape.clone(), limits, sealer.clone());
        Self {
            shape,
            limits,
            sealer,
            events: events.in_background(),
            is_announced: false,
        }
    }

    pub(super) fn is_announced(&self) -> bool {
        self.is_announced
    }

    /// Says that it waits.
    pub(super) fn announce(&mut self) -> Vec<u8> {
        self.is_announced = true;
        let mut out = Vec::new();
        self.events.announce(&mut out);
        out
    }

    /// What an engine said, and how it ended once it has.
    pub(super) fn push(&mut self, heard: &[u8], is_over: bool) -> (Vec<u8>, Option<Outcome>) {
        let mut out = Vec::with_capacity(heard.len() + heard.len() / 4);
        let mut outcome = self.events.push(heard, &mut out);
        if is_over && outcome.is_none() {
            outcome = self.events.finish(&mut out);
        }
        (out, outcome)
    }

    /// No engine took it.
    pub(super) fn refuse(&mut self, error: &ApiError) -> (Vec<u8>, Outcome) {
        let (out, mut outcome) = self.fail(&error.message);
        if let Some(failure) = &mut outcome.error
            && error.status.is_client_error()
        {
            failure.code = "invalid_prompt";
        }
        (out, outcome)
    }

    pub(super) fn fail(&mut self, why: &str) -> (Vec<u8>, Outcome) {
        let mut out = Vec::new();
        let outcome = self.events.refuse(why, &mut out);
        (out, outcome)
    }

    /// It fails after what another replica told of it: that is its output.
    pub(super) fn fail_after(&mut self, log: &Log, why: &str) -> (Vec<u8>, Outcome) {
        let partial = self
            .again()
            .cut_again(log.stored_text().unwrap_or_default());
        self.events.go_on_at(log.stored());
        let outcome = Outcome {
            output: partial.output,
            told: partial.told,
            ..Outcome::failed("server_error", why)
        };
        (Vec::new(), outcome)
    }

    fn again(&self) -> Events {
        let events = Events::new(self.shape.clone(), self.limits, self.sealer.clone());
        events.in_background()
    }

    /// The object that it ends as, and an item of the router's own.
    pub(super) async fn compose(&self, finish: &Finish, outcome: &mut Outcome) -> Composed {
        let (shape, place) = (self.events.shape(), self.events.place());
        finish.compose(shape, outcome, place).await
    }

    /// Its last events.
    pub(super) fn conclude(
        &mut self,
        course: &mut Course,
        (response, state): Composed,
        outcome: Outcome,
    ) -> End {
        let mut out = Vec::new();
        if let Some((added, done)) = &state {
            self.events.add_item(added, done, &mut out);
        }
        course.on_events(&out);
        let text = course.log().text().filter(|_| course.streams());
        let cut = text.map(log::sealed).unwrap_or_default();
        self.last(course, &response, &outcome);
        End {
            token: Token(fastrand::u64(..)),
            outcome,
            response: response.into(),
            cut,
        }
    }

    /// Its end without its output, which the store would not keep.
    pub(super) fn shorten(&mut self, course: &mut Course, number: u64) -> End {
        let outcome = Outcome::failed("server_error", TOO_LARGE);
        let response = self.shape.ended(&outcome, observe::unix_s().unsigned_abs());
        self.events.go_on_at(number);
        self.last(course, &response, &outcome);
        End {
            token: Token(fastrand::u64(..)),
            outcome,
            response: response.into(),
            cut: Bytes::new(),
        }
    }

    fn last(&mut self, course: &mut Course, response: &[u8], outcome: &Outcome) {
        let mut out = Vec::new();
        self.events.end(response, outcome, &mut out);
        course.on_last_event(out.strip_suffix(MARK).unwrap_or(&out));
    }

    /// What there is of a cancelled response: what its readers were told, and no more.
    pub(super) fn cut(&mut self, course: &Course, response: Bytes) -> Amend {
        let told = course.log().stored_text().filter(|_| course.streams());
        let outcome = match told {
            Some(told) => self.again().cut_again(told),
            None => {
                let again = self.again();
                std::mem::replace(&mut self.events, again).cut()
            }
        };
        Amend {
            content: Content {
                response,
                output: outcome.output.into(),
            },
            cut: told.map(log::sealed).unwrap_or_default(),
        }
    }
}

impl End {
    pub(super) fn with(&self, batch: Option<Batch>, finish: &Finish) -> Final {
        Final {
            token: self.token,
            status: self.outcome.status,
            content: Content {
                response: self.response.clone(),
                output: Bytes::copy_from_slice(&self.outcome.output),
            },
            hint: Hint {
                model: finish.model.clone(),
                worker: finish.worker.clone(),
            },
            batch,
            cut: self.cut.clone(),
        }
    }
}
