//! Metrics of responses.

use tracing::warn;

use crate::observe::metrics::{Counted, metric_table};
use crate::store::{CommitRefusal, Status};

/// Buckets for the items of a history: a first question, a chat, an agent at work for a day.
const ITEMS: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0,
];
/// Buckets for its bytes as JSON.
const BYTES: &[f64] = &[1e3, 4e3, 16e3, 64e3, 256e3, 1e6, 4e6, 16e6, 64e6];
/// Buckets for the seconds to read it from the store.
const SECONDS: &[f64] = &[
    0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.0,
];

metric_table! {
    #[derive(Clone, Debug)]
    pub(super) struct Metrics {
        in_flight: gauges "warmroute_responses_in_flight" ["mode"]
            "Responses being generated, by mode: stored, unstored or background.",
        finished: counters "warmroute_responses_finished_total" ["status"]
            "Responses that reached a final status, by status.",
        history_items: histogram "warmroute_responses_history_items" in ITEMS
            "Items of the history that a request continues.",
        history_bytes: histogram "warmroute_responses_history_bytes" in BYTES
            "Bytes of the history that a request continues, as stored.",
        pub(super) history_seconds: histogram "warmroute_responses_history_read_seconds" in SECONDS
            "Time to read the history that a request continues.",
        not_stored: counters "warmroute_responses_not_stored_total" ["outcome"]
            "Responses that should have been stored and were not, by outcome: served or withheld from the client (503) because \
             the store failed, or deleted, because one that they continue was deleted while they ran.",
        over_chat: counters "warmroute_responses_over_chat_total" ["outcome"]
            "Requests of the Responses API made chat completions for workers that speak only these, by outcome: converted, or \
             refused because of something that a chat completion cannot have.",
        replaced_arguments: counter "warmroute_responses_over_chat_replaced_arguments_total"
            "Arguments of earlier calls that were no JSON object and were replaced by {} (responses.chat.invalid_arguments).",
        tools_left_out: counter "warmroute_responses_over_chat_tools_left_out_total"
            "Answers of workers that speak chat completions only to requests with tools that these cannot have, which were left \
             out (responses.chat.unsupported_tools).",
        pub(super) conversation_conflicts: counter "warmroute_responses_conversation_conflicts_total"
            "Requests refused because another response was being added to the same conversation.",
        turns_refused: counters "warmroute_responses_turns_refused_total" ["reason"]
            "Responses that their conversation did not accept at their end, by reason: another response was added first \
             (changed), it was deleted (not_found), it is too large, or the store lost a part of it (damaged). Those with \
             `changed` of which no client had any part were generated again; the others failed.",
        prewarms_in_flight: gauge "warmroute_prewarms_in_flight"
            "Prompts that are being computed ahead of their next turn.",
        prewarms: counters "warmroute_prewarms_total" ["outcome"]
            "Prompts to be computed ahead of their next turn, by outcome: done, failed, or skipped because \
             32 ran or there was no memory.",
    }
}

impl Metrics {
    pub(super) fn on_history(&self, items: usize, bytes: usize) {
        self.history_items.observe(items as f64);
        self.history_bytes.observe(bytes as f64);
    }

    /// Said once; from then on the header of each answer says it.
    pub(super) fn on_tools_left_out(&self, types: &[String]) {
        if self.tools_left_out.get() == 0 {
            warn!(
                ?types,
                "tools that a worker with chat completions only cannot have were left out; the header x-warmroute-tools-left-out names them in each answer"
            );
        }
        self.tools_left_out.inc();
    }

    pub(super) fn on_turn_refused(&self, refusal: CommitRefusal) {
        let reason = match refusal {
            CommitRefusal::Unlocked | CommitRefusal::Taken => "changed",
            CommitRefusal::Gone => "not_found",
            CommitRefusal::TooLarge => "too_large",
            CommitRefusal::Damaged => "damaged",
        };
        self.turns_refused.with_label_values(&[reason]).inc();
    }

    pub(super) fn on_end(&self, status: Status) {
        self.finished.with_label_values(&[status.as_str()]).inc();
    }

    /// A request was made a chat completion, or could not be.
    pub(super) fn on_converted(&self, replaced_arguments: Option<u64>) {
        let outcome = match replaced_arguments {
            Some(count) => {
                self.replaced_arguments.inc_by(count);
                "converted"
            }
            None => "refused",
        };
        self.over_chat.with_label_values(&[outcome]).inc();
    }

    /// A response that should have been stored was served without that, withheld, or continues one that was deleted.
    pub(super) fn on_not_stored(&self, outcome: &str) {
        self.not_stored.with_label_values(&[outcome]).inc();
    }

    pub(super) fn begin(&self, is_stored: bool) -> Counted {
        let mode = if is_stored { "stored" } else { "unstored" };
        Counted::new(&self.in_flight.with_label_values(&[mode]))
    }

    /// None while `max` run.
    pub(super) fn begin_prewarm(&self, max: i64) -> Option<Counted> {
        if self.prewarms_in_flight.get() >= max {
            self.on_prewarm_skipped();
            return None;
        }
        Some(Counted::new(&self.prewarms_in_flight))
    }

    pub(super) fn on_prewarm_skipped(&self) {
        self.prewarms.with_label_values(&["skipped"]).inc();
    }

    pub(super) fn on_prewarm(&self, is_done: bool) {
        let outcome = if is_done { "done" } else { "failed" };
        self.prewarms.with_label_values(&[outcome]).inc();
    }

    pub(super) fn begin_background(&self) -> Counted {
        Counted::new(&self.in_flight.with_label_values(&["background"]))
    }

    /// The responses in flight, and the finished ones by status.
    pub(super) fn counts(&self) -> (i64, Vec<(&'static str, u64)>) {
        let modes = ["stored", "unstored", "background"]
            .map(|mode| self.in_flight.with_label_values(&[mode]).get());
        let finished = Status::ALL
            .into_iter()
            .filter(|status| status.is_terminal());
        let finished = finished.map(|status| {
            let count = self.finished.with_label_values(&[status.as_str()]).get();
            (status.as_str(), count)
        });
        (modes.iter().sum(), finished.collect())
    }
}
