//! Which probes of a worker are due, in which order, and what their results change. Pure.
//!
//! ```text
//! CheckHealth ─▶ (AskIfAsleep) ─▶ Record ─▶ (ListModels) ─▶ ReadUse ─▶ (FetchLoad) ─▶ (AskBootstrap) ─▶ Settle ─▶ Wait
//!   └─▶ Wait                                                   └─▶ ExpireReport ─▶ Settle
//!       the router itself lacks resources                          the check failed, or the engine sleeps
//! ```

use std::time::{Duration, Instant};

use super::get::ProbeError;
use super::sleep::{self, SleepPage};
use crate::fleet::ResponsesApi;
use crate::fleet::health::{self, Health};

/// Models and version change only with a restart or a new adapter, so not every probe asks for them.
const PROBES_PER_FACTS: u32 = 8;
/// An idle worker is asked for its load with every fifth probe. Its cache changes only with a restart, which health checks
/// and KV events also show.
const PROBES_PER_IDLE_LOAD: u32 = 5;
/// A worker that had requests of other clients is asked with each probe for so long.
const SHARED_FOR: Duration = Duration::from_secs(60);

const NO_MODELS: &str = "/v1/models lists none";

/// What the task must do next.
#[derive(Debug, PartialEq)]
#[must_use]
pub(super) enum Step {
    /// Call [`ProbeSchedule::on_health`] with the result of a health check.
    CheckHealth,
    /// Call [`ProbeSchedule::on_sleep_page`] with what the engine says.
    AskIfAsleep,
    /// Store why the health check failed, if it did, and count it; then [`ProbeSchedule::on_recorded`].
    Record {
        error: Option<String>,
        is_failure: bool,
    },
    /// Ask for the models and for the APIs that are served; then [`ProbeSchedule::on_models`].
    ListModels {
        asks_messages: bool,
        asks_responses: bool,
    },
    /// Call [`ProbeSchedule::on_use`] with what the router has counted.
    ReadUse,
    /// Ask for the load; then [`ProbeSchedule::on_load`].
    FetchLoad,
    /// The last report of the load is void; then [`ProbeSchedule::on_probed`].
    ExpireReport,
    /// Ask the bootstrap server; then [`ProbeSchedule::on_probed`].
    AskBootstrap,
    /// Publish the health if it has changed, and log; then [`ProbeSchedule::on_settled`].
    Settle {
        health: Option<Health>,
        log: Option<LoggedState>,
    },
    /// The round is over: wait, then [`ProbeSchedule::begin`].
    Wait(Duration),
}

/// What is logged of a worker's health. Each state is logged once.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum LoggedState {
    Up,
    /// It gets no requests, because it lists no models, for this reason.
    WithoutModels(String),
    Down,
}

/// What a worker has said when it was asked for its models, and for the APIs that it serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ListedModels {
    pub(super) has_any: bool,
    /// Of each API that it was asked for it has said whether it serves it.
    pub(super) has_said_apis: bool,
}

/// What the router has counted of a worker.
#[derive(Clone, Copy, Debug)]
pub(super) struct WorkerUse {
    /// Its requests since it joined.
    pub(super) total: u64,
    /// Whether it has requests of other clients.
    pub(super) is_shared: bool,
    /// Whether nothing runs at it, as far as is known.
    pub(super) is_idle: bool,
}

#[derive(Debug, Default)]
pub(super) struct ProbeSchedule {
    machine: health::Machine,
    settings: health::Settings,
    responses: ResponsesApi,
    has_bootstrap: bool,
    /// The rounds before this one.
    rounds: u32,
    /// Whether the health check of this round succeeded at an engine that does not sleep.
    is_good: bool,
    is_asleep: bool,
    /// Whether it is good now, and was not up.
    turned_up: bool,
    /// What the engine said last of whether it sleeps; nothing if it does not have the page.
    said_asleep: Option<bool>,
    /// Whether its models were ever listed.
    has_facts: bool,
    /// Why a worker that is up has no models.
    no_models: Option<String>,
    /// Another process may be there than the one that last said which APIs it serves.
    may_serve_other_apis: bool,
    /// The setting with which it was found out whether the worker serves the Responses API.
    asked_for: Option<ResponsesApi>,
    /// The worker's requests when its load was last asked for.
    asked_at_total: u64,
    /// When the worker last had requests of other clients.
    foreign_at: Option<Instant>,
    /// When its process started, in seconds since 1970.
    started: Option<f64>,
    /// Failed rounds in a row.
    failures: u32,
    logged: Option<LoggedState>,
}

impl ProbeSchedule {
    /// A round begins, with the settings of now. `has_bootstrap`: the worker has a bootstrap server.
    pub(super) fn begin(
        &mut self,
        settings: health::Settings,
        responses: ResponsesApi,
        has_bootstrap: bool,
    ) -> Step {
        self.settings = settings;
        self.responses = responses;
        self.has_bootstrap = has_bootstrap;
        self.is_asleep = false;
        Step::CheckHealth
    }

    pub(super) fn on_health(&mut self, checked: Result<(), ProbeError>) -> Step {
        match checked {
            // It says nothing about the worker.
            Err(error) if error.is_local => self.on_settled(1.0),
            Err(error) => self.record(Some(error.text)),
            Ok(()) => {
                let may_sleep = self.said_asleep.is_some();
                if may_sleep || !self.is_up() || self.is_each(PROBES_PER_FACTS) {
                    Step::AskIfAsleep
                } else {
                    self.record(None)
                }
            }
        }
    }

    pub(super) fn on_sleep_page(&mut self, page: SleepPage) -> Step {
        self.said_asleep = match page {
            SleepPage::Asleep => Some(true),
            SleepPage::Awake => Some(false),
            SleepPage::Missing => None,
            // One lost response wakes no engine.
            SleepPage::Lost => self.said_asleep,
        };
        self.is_asleep = self.said_asleep == Some(true);
        self.record(self.is_asleep.then(|| sleep::REASON.to_owned()))
    }

    fn record(&mut self, error: Option<String>) -> Step {
        self.is_good = error.is_none();
        self.turned_up = self.is_good && !self.is_up();
        self.may_serve_other_apis |= self.turned_up;
        Step::Record {
            error,
            is_failure: !self.is_good && !self.is_asleep,
        }
    }

    /// A worker's models are asked for before it is up: without them it gets no requests.
    pub(super) fn on_recorded(&mut self) -> Step {
        let is_due = !self.has_facts || self.is_each(PROBES_PER_FACTS);
        let must_list = self.turned_up || (self.is_good && is_due);
        if !must_list {
            return Step::ReadUse;
        }
        let asks_all = self.may_serve_other_apis;
        Step::ListModels {
            asks_messages: asks_all,
            asks_responses: asks_all || self.asked_for != Some(self.responses),
        }
    }

    /// What the engine lists, or why it could not be asked. Models that were listed before stay then. It is asked for the
    /// APIs again with the next list, until it has said of each whether it serves it.
    pub(super) fn on_models(&mut self, listed: Result<ListedModels, String>) -> Step {
        match listed {
            Ok(listed) => {
                self.no_models = (!listed.has_any).then(|| NO_MODELS.to_owned());
                self.has_facts = true;
                self.may_serve_other_apis = !listed.has_said_apis;
                self.asked_for = Some(self.responses);
            }
            Err(error) => self.no_models = (!self.has_facts).then_some(error),
        }
        Step::ReadUse
    }

    pub(super) fn on_use(&mut self, now: Instant, used: WorkerUse) -> Step {
        if used.is_shared {
            self.foreign_at = Some(now);
        }
        let since_shared = self.foreign_at.map(|at| now.saturating_duration_since(at));
        let is_shared = since_shared.is_some_and(|since| since < SHARED_FOR);
        let is_used = used.total != self.asked_at_total || !used.is_idle;
        let may_have_changed = self.turned_up || is_shared || is_used;
        if self.is_good && (may_have_changed || self.is_each(PROBES_PER_IDLE_LOAD)) {
            self.asked_at_total = used.total;
            return Step::FetchLoad;
        }
        self.on_load()
    }

    /// When the process started, if the engine says so. True if it is another process than before.
    pub(super) fn on_start_time(&mut self, started: Option<f64>) -> bool {
        let before = self.started;
        self.started = started.or(before);
        let is_other = before.is_some() && self.started != before;
        // One that was down was asked in this round.
        self.may_serve_other_apis |= is_other && !self.turned_up;
        is_other
    }

    /// The load was asked for. The bootstrap server is asked after that: a restart clears what it said.
    pub(super) fn on_load(&mut self) -> Step {
        if !self.is_good {
            return Step::ExpireReport;
        }
        if self.has_bootstrap {
            return Step::AskBootstrap;
        }
        self.on_probed()
    }

    /// All probes of the round were made.
    pub(super) fn on_probed(&mut self) -> Step {
        let health = if self.is_asleep {
            self.machine.on_sleep()
        } else {
            self.machine.on_probe(self.is_good, &self.settings)
        };
        self.failures = if self.is_good {
            0
        } else {
            self.failures.saturating_add(1)
        };
        let log = self
            .state()
            .filter(|state| self.logged.as_ref() != Some(state));
        if log.is_some() {
            self.logged.clone_from(&log);
        }
        Step::Settle { health, log }
    }

    /// What the log should say of the worker.
    fn state(&self) -> Option<LoggedState> {
        match (self.machine.health(), &self.no_models) {
            (Health::Up, None) => Some(LoggedState::Up),
            (Health::Up, Some(reason)) => Some(LoggedState::WithoutModels(reason.clone())),
            // A worker that never was up gets no requests from its first failed check on, but it may be starting.
            (Health::Unknown | Health::Down, _) => {
                let is_down = self.is_asleep || self.failures >= self.settings.unhealthy_threshold;
                is_down.then_some(LoggedState::Down)
            }
        }
    }

    /// `jitter`: about 1, so that a thousand workers are not probed in one burst.
    pub(super) fn on_settled(&mut self, jitter: f64) -> Step {
        self.rounds = self.rounds.wrapping_add(1);
        Step::Wait(self.settings.interval.mul_f64(jitter))
    }

    fn is_up(&self) -> bool {
        self.machine.health() == Health::Up
    }

    /// Whether this round is one of those of which there is one in so many.
    fn is_each(&self, rounds: u32) -> bool {
        self.rounds.is_multiple_of(rounds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe;

    /// A worker as its probes find it.
    #[derive(Clone, Copy)]
    struct Found {
        /// How its health check fails: locally, or with this text.
        failure: Option<(bool, &'static str)>,
        sleep_page: SleepPage,
        lists_any: Result<bool, &'static str>,
        says_apis: bool,
        responses: ResponsesApi,
        used: WorkerUse,
        has_bootstrap: bool,
    }

    const IDLE: WorkerUse = WorkerUse {
        total: 0,
        is_shared: false,
        is_idle: true,
    };
    const GOOD: Found = Found {
        failure: None,
        sleep_page: SleepPage::Missing,
        lists_any: Ok(true),
        says_apis: true,
        responses: ResponsesApi::Auto,
        used: IDLE,
        has_bootstrap: false,
    };
    const FAILED: Found = Found {
        failure: Some((false, "refused")),
        ..GOOD
    };
    const ASLEEP: Found = Found {
        sleep_page: SleepPage::Asleep,
        ..GOOD
    };
    const USED: Found = Found {
        used: WorkerUse {
            is_idle: false,
            ..IDLE
        },
        ..GOOD
    };

    /// Runs one round `seconds` after the start, and writes its steps as words.
    fn round(schedule: &mut ProbeSchedule, start: Instant, seconds: u64, found: Found) -> String {
        let now = start + Duration::from_secs(seconds);
        let settings = health::Settings::default();
        let mut step = schedule.begin(settings, found.responses, found.has_bootstrap);
        let mut words = Vec::new();
        loop {
            let (word, next) = match step {
                Step::CheckHealth => {
                    let failed = found.failure.map(|(is_local, text)| ProbeError {
                        text: text.to_owned(),
                        is_local,
                        is_timeout: false,
                        is_status: false,
                        is_missing: false,
                    });
                    let checked = failed.map_or(Ok(()), Err);
                    ("", schedule.on_health(checked))
                }
                Step::AskIfAsleep => ("sleep?", schedule.on_sleep_page(found.sleep_page)),
                Step::Record { is_failure, .. } => {
                    let word = if is_failure { "failed" } else { "" };
                    (word, schedule.on_recorded())
                }
                Step::ListModels {
                    asks_messages,
                    asks_responses,
                } => {
                    let word = match (asks_messages, asks_responses) {
                        (true, true) => "models+apis",
                        (false, true) => "models+responses",
                        (true, false) => "models+messages",
                        (false, false) => "models",
                    };
                    let listed = found.lists_any.map(|has_any| ListedModels {
                        has_any,
                        has_said_apis: found.says_apis,
                    });
                    (word, schedule.on_models(listed.map_err(str::to_owned)))
                }
                Step::ReadUse => ("", schedule.on_use(now, found.used)),
                Step::FetchLoad => ("load", schedule.on_load()),
                Step::ExpireReport => ("expire", schedule.on_probed()),
                Step::AskBootstrap => ("bootstrap", schedule.on_probed()),
                Step::Settle { health, log } => {
                    words.extend(health.map(Health::as_str));
                    let word = match log {
                        None => "",
                        Some(LoggedState::Up) => "log:up",
                        Some(LoggedState::WithoutModels(_)) => "log:without",
                        Some(LoggedState::Down) => "log:down",
                    };
                    (word, schedule.on_settled(1.0))
                }
                Step::Wait(pause) => {
                    assert_eq!(pause, health::Settings::default().interval);
                    words.retain(|word| !word.is_empty());
                    return words.join(" ");
                }
            };
            words.push(word);
            step = next;
        }
    }

    /// Each row: a round, and its steps; the rounds are two seconds apart.
    fn check(rows: &[(Found, &str)]) {
        let (mut schedule, start) = (ProbeSchedule::default(), observe::now());
        for (row, (found, expected)) in rows.iter().enumerate() {
            let done = round(&mut schedule, start, 2 * row as u64, *found);
            assert_eq!(done, *expected, "round {row}");
        }
    }

    #[test]
    fn a_new_worker_is_asked_for_everything_before_it_is_up_and_then_for_little() {
        check(&[
            (GOOD, "sleep? models+apis load up log:up"),
            (GOOD, ""),
            (GOOD, ""),
            (GOOD, ""),
            (GOOD, ""),
            (GOOD, "load"),
            (GOOD, ""),
            (GOOD, ""),
            (GOOD, "sleep? models"),
            (GOOD, ""),
            (GOOD, "load"),
        ]);
    }

    #[test]
    fn a_worker_is_down_and_up_again_as_its_thresholds_say() {
        check(&[
            (GOOD, "sleep? models+apis load up log:up"),
            (FAILED, "failed expire"),
            (FAILED, "failed expire"),
            (FAILED, "failed expire down log:down"),
            (FAILED, "failed expire"),
            (GOOD, "sleep? models+apis load up log:up"),
        ]);
    }

    #[test]
    fn a_worker_that_starts_is_down_at_once_and_said_to_be_later() {
        check(&[
            (FAILED, "failed expire down"),
            (FAILED, "failed expire"),
            (FAILED, "failed expire log:down"),
        ]);
    }

    #[test]
    fn a_worker_that_sleeps_is_down_at_once_without_a_failed_check() {
        let awake = Found {
            sleep_page: SleepPage::Awake,
            ..GOOD
        };
        check(&[
            (awake, "sleep? models+apis load up log:up"),
            (awake, "sleep?"),
            (ASLEEP, "sleep? expire down log:down"),
            (ASLEEP, "sleep? expire"),
            (awake, "sleep? models+apis load up log:up"),
        ]);
    }

    #[test]
    fn a_lost_answer_neither_wakes_a_worker_nor_says_that_it_cannot_sleep() {
        let awake = Found {
            sleep_page: SleepPage::Awake,
            ..GOOD
        };
        let lost = Found {
            sleep_page: SleepPage::Lost,
            ..GOOD
        };
        check(&[
            (awake, "sleep? models+apis load up log:up"),
            (lost, "sleep?"),
            (ASLEEP, "sleep? expire down log:down"),
            (lost, "sleep? expire"),
            (awake, "sleep? models+apis load up log:up"),
            (GOOD, "sleep? load"),
            // The page is gone, so it is not asked for.
            (GOOD, ""),
        ]);
        // Nothing is known of an engine that has never answered.
        check(&[
            (lost, "sleep? models+apis load up log:up"),
            (lost, ""),
            (ASLEEP, ""),
        ]);
    }

    #[test]
    fn a_router_without_resources_learns_nothing_of_the_worker() {
        let local = Found {
            failure: Some((true, "no file descriptor")),
            ..GOOD
        };
        check(&[
            (local, ""),
            (GOOD, "sleep? models+apis load up log:up"),
            (local, ""),
            (local, ""),
            (local, ""),
            (GOOD, "load"),
        ]);
    }

    #[test]
    fn a_worker_without_models_is_asked_again_until_it_answers() {
        let empty = Found {
            lists_any: Ok(false),
            ..GOOD
        };
        let silent = Found {
            lists_any: Err("no response"),
            ..GOOD
        };
        check(&[
            (silent, "sleep? models+apis load up log:without"),
            (silent, "models+apis"),
            (empty, "models+apis log:without"),
            (GOOD, ""),
        ]);
        // What was listed before stays.
        let mut schedule = ProbeSchedule::default();
        let start = observe::now();
        let _ = round(&mut schedule, start, 0, GOOD);
        for _ in 1..8 {
            let _ = round(&mut schedule, start, 0, GOOD);
        }
        assert_eq!(round(&mut schedule, start, 0, silent), "sleep? models");
    }

    #[test]
    fn a_worker_is_asked_which_apis_it_serves_until_it_has_said_so() {
        let mute = Found {
            says_apis: false,
            ..GOOD
        };
        let silent = Found {
            lists_any: Err("no response"),
            ..GOOD
        };
        let mut rows = vec![(mute, "sleep? models+apis load up log:up")];
        rows.extend([(GOOD, ""); 4]);
        rows.extend([(GOOD, "load"), (GOOD, ""), (GOOD, "")]);
        rows.extend([(GOOD, "sleep? models+apis"), (GOOD, "")]);
        rows.extend([(GOOD, "load"), (GOOD, ""), (GOOD, ""), (GOOD, "")]);
        rows.extend([(GOOD, ""), (GOOD, "load"), (GOOD, "sleep? models")]);
        check(&rows);
        check(&[
            (GOOD, "sleep? models+apis load up log:up"),
            (FAILED, "failed expire"),
            (FAILED, "failed expire"),
            (FAILED, "failed expire down log:down"),
            (silent, "sleep? models+apis load up log:up"),
            (GOOD, "load"),
            (GOOD, ""),
            (GOOD, ""),
            (GOOD, "sleep? models+apis"),
        ]);
    }

    #[test]
    fn a_process_that_started_again_unnoticed_is_asked_which_apis_it_serves() {
        let (mut schedule, start) = (ProbeSchedule::default(), observe::now());
        let _ = round(&mut schedule, start, 0, GOOD);
        assert!(!schedule.on_start_time(Some(1.0)));
        for _ in 1..8 {
            let _ = round(&mut schedule, start, 0, GOOD);
        }
        assert!(schedule.on_start_time(Some(2.0)));
        let done = round(&mut schedule, start, 0, GOOD);
        assert_eq!(done, "sleep? models+apis");
    }

    #[test]
    fn another_setting_for_the_responses_api_is_followed_with_the_next_list_of_models() {
        let other = Found {
            responses: ResponsesApi::Native,
            ..GOOD
        };
        let mut rows = vec![(GOOD, "sleep? models+apis load up log:up")];
        rows.extend([(other, ""); 4]);
        rows.extend([(other, "load"), (other, ""), (other, "")]);
        rows.push((other, "sleep? models+responses"));
        check(&rows);
    }

    #[test]
    fn the_load_of_a_worker_is_asked_for_while_it_may_have_changed() {
        let requested = Found {
            used: WorkerUse { total: 1, ..IDLE },
            ..GOOD
        };
        let shared = Found {
            used: WorkerUse {
                is_shared: true,
                ..requested.used
            },
            ..GOOD
        };
        check(&[
            (GOOD, "sleep? models+apis load up log:up"),
            (USED, "load"),
            (requested, "load"),
            (requested, ""),
            (shared, "load"),
            (requested, "load"),
        ]);
        let (mut schedule, start) = (ProbeSchedule::default(), observe::now());
        let _ = round(&mut schedule, start, 0, shared);
        assert_eq!(round(&mut schedule, start, 59, requested), "load");
        assert_eq!(round(&mut schedule, start, 60, requested), "");
    }

    #[test]
    fn a_bootstrap_server_is_asked_with_each_good_check() {
        let prefill = Found {
            has_bootstrap: true,
            ..GOOD
        };
        let failed = Found {
            has_bootstrap: true,
            ..FAILED
        };
        check(&[
            (prefill, "sleep? models+apis load bootstrap up log:up"),
            (prefill, "bootstrap"),
            (failed, "failed expire"),
        ]);
    }

    #[test]
    fn a_restart_is_a_later_start_of_the_process() {
        let mut schedule = ProbeSchedule::default();
        for (started, expected) in [
            (None, false),
            (Some(1.0), false),
            (Some(1.0), false),
            (None, false),
            (Some(2.0), true),
            (Some(2.0), false),
        ] {
            assert_eq!(schedule.on_start_time(started), expected, "{started:?}");
        }
    }
}
