//! What is shown, and what the keys do: sort, filter, scroll, quit. Pure.

use super::figures::Samples;
use crate::admin::WorkerRow;
use crate::fleet::health::Health;
use crate::http::circuit_breaker;
use crate::observe::metrics_text::Series;

const TTFT: &str = "warmroute_time_to_first_token_seconds";
const ITL: &str = "warmroute_inter_token_latency_seconds";

/// By which the table is sorted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Column {
    #[default]
    Worker,
    Role,
    State,
    Running,
    Queued,
    Cache,
    Rate,
    Ttft,
    TtftP99,
    Itl,
    Events,
}

/// The columns with their titles and widths, which fit into 80 columns with names of 9 letters.
pub(super) const COLUMNS: [(Column, &str, usize); 11] = [
    (Column::Worker, "WORKER", 16),
    (Column::Role, "ROLE", 7),
    (Column::State, "STATE", 9),
    (Column::Running, "RUN", 4),
    (Column::Queued, "QUEUED", 6),
    (Column::Cache, "CACHE", 5),
    (Column::Rate, "REQ/S", 5),
    (Column::Ttft, "TTFT", 6),
    (Column::TtftP99, "P99", 6),
    (Column::Itl, "ITL", 6),
    (Column::Events, "EVENTS", 7),
];

/// What a terminal sends.
#[cfg_attr(
    not(feature = "top"),
    allow(dead_code, reason = "the screen sends them")
)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    Letter(char),
    Up,
    Down,
    PageUp,
    PageDown,
    Home,
    End,
    Enter,
    Escape,
    Backspace,
}

/// What the user looks at.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct State {
    pub(super) sort: Column,
    pub(super) is_reversed: bool,
    /// Part of a name, a role, a state or a model.
    pub(super) filter: String,
    /// Letters go to the filter.
    pub(super) is_editing: bool,
    /// Rows above the first one shown.
    pub(super) offset: usize,
    /// Decisions are shown instead of workers.
    pub(super) shows_decisions: bool,
}

/// Letters of a filter.
const MAX_FILTER: usize = 64;

#[cfg_attr(not(feature = "top"), allow(dead_code, reason = "the screen calls it"))]
impl State {
    /// True if the key ends the program. `rows` there are, of which `shown` fit.
    pub(super) fn on_key(&mut self, key: Key, rows: usize, shown: usize) -> bool {
        if self.is_editing {
            self.edit(key);
            return false;
        }
        let last = rows.saturating_sub(shown);
        match key {
            Key::Letter('q') => return true,
            Key::Letter('/') => self.is_editing = true,
            Key::Letter('d') => {
                self.shows_decisions = !self.shows_decisions;
                self.offset = 0;
            }
            Key::Letter('s') => self.sort_by(1),
            Key::Letter('S') => self.sort_by(COLUMNS.len() - 1),
            Key::Letter('r') => self.is_reversed = !self.is_reversed,
            Key::Letter('j') | Key::Down => self.offset += 1,
            Key::Letter('k') | Key::Up => self.offset = self.offset.saturating_sub(1),
            Key::PageDown | Key::Letter(' ') => self.offset += shown.max(1),
            Key::PageUp => self.offset = self.offset.saturating_sub(shown.max(1)),
            Key::Home | Key::Letter('g') => self.offset = 0,
            Key::End | Key::Letter('G') => self.offset = last,
            Key::Escape => {
                self.filter.clear();
                self.offset = 0;
            }
            Key::Letter(_) | Key::Enter | Key::Backspace => {}
        }
        self.offset = self.offset.min(last);
        false
    }

    fn edit(&mut self, key: Key) {
        match key {
            Key::Enter => self.is_editing = false,
            Key::Escape => {
                self.is_editing = false;
                self.filter.clear();
            }
            Key::Backspace => drop(self.filter.pop()),
            Key::Letter(letter) if self.filter.len() < MAX_FILTER => self.filter.push(letter),
            _ => {}
        }
        self.offset = 0;
    }

    fn sort_by(&mut self, steps: usize) {
        let now = COLUMNS.iter().position(|(column, ..)| *column == self.sort);
        let next = (now.unwrap_or(0) + steps) % COLUMNS.len();
        self.sort = COLUMNS[next].0;
    }
}

/// A worker's line.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Row {
    pub(super) cells: Vec<String>,
    pub(super) is_up: bool,
}

/// The lines of the table, filtered and sorted.
pub(super) fn rows(samples: &Samples, state: &State) -> Vec<Row> {
    let Some(sample) = samples.newest() else {
        return Vec::new();
    };
    let workers = sample.fleet.workers.iter();
    let mut lines: Vec<Line<'_>> = workers
        .filter(|worker| matches(worker, &state.filter))
        .map(|worker| Line::new(worker, samples))
        .collect();
    lines.sort_by(|a, b| {
        let order = a.compare(b, state.sort);
        let order = if state.is_reversed {
            order.reverse()
        } else {
            order
        };
        order.then_with(|| a.worker.name.cmp(&b.worker.name))
    });
    lines.iter().map(Line::row).collect()
}

/// The state of a worker in one word: the worst of what is so.
fn state_of(worker: &WorkerRow) -> &'static str {
    match (worker.health, worker.circuit_breaker) {
        (Health::Up, _) if worker.is_draining => "draining",
        (Health::Up, circuit_breaker::State::Closed) => "up",
        (Health::Up, breaker) => breaker.as_str(),
        (health, _) => health.as_str(),
    }
}

fn matches(worker: &WorkerRow, filter: &str) -> bool {
    let filter = filter.to_lowercase();
    let fields = [&*worker.name, worker.role.as_str(), state_of(worker)];
    let models = worker.models.iter().map(String::as_str);
    let mut fields = fields.into_iter().chain(models);
    filter.is_empty() || fields.any(|field| field.to_lowercase().contains(&filter))
}

struct Line<'a> {
    worker: &'a WorkerRow,
    events: &'a str,
    running: u32,
    cache: Option<f64>,
    rate: Option<f64>,
    ttft: Option<f64>,
    ttft_p99: Option<f64>,
    itl: Option<f64>,
}

impl<'a> Line<'a> {
    fn new(worker: &'a WorkerRow, samples: &'a Samples) -> Self {
        let name = &*worker.name;
        let percentile = |family, share| samples.percentile(Some(name), family, share);
        Self {
            worker,
            events: samples.events(name),
            running: worker.requests,
            cache: worker.reported.as_ref().map(|reported| reported.kv_usage),
            rate: samples.rate_of(name, "warmroute_requests_total"),
            ttft: percentile(TTFT, 0.5),
            ttft_p99: percentile(TTFT, 0.99),
            itl: percentile(ITL, 0.5),
        }
    }

    /// Names from a to z, numbers from the highest.
    fn compare(&self, other: &Self, column: Column) -> std::cmp::Ordering {
        let number = |of: fn(&Self) -> Option<f64>| {
            let value = |line: &Self| of(line).unwrap_or(-1.0);
            value(other).total_cmp(&value(self))
        };
        match column {
            Column::Worker => self.worker.name.cmp(&other.worker.name),
            Column::Role => self.worker.role.as_str().cmp(other.worker.role.as_str()),
            Column::State => state_of(self.worker).cmp(state_of(other.worker)),
            Column::Events => self.events.cmp(other.events),
            Column::Running => other.running.cmp(&self.running),
            Column::Queued => other.worker.queued_tokens.cmp(&self.worker.queued_tokens),
            Column::Cache => number(|line| line.cache),
            Column::Rate => number(|line| line.rate),
            Column::Ttft => number(|line| line.ttft),
            Column::TtftP99 => number(|line| line.ttft_p99),
            Column::Itl => number(|line| line.itl),
        }
    }

    fn row(&self) -> Row {
        let worker = self.worker;
        let cells = vec![
            shown(&worker.name),
            worker.role.to_string(),
            state_of(worker).to_owned(),
            self.running.to_string(),
            count(worker.queued_tokens as f64),
            self.cache.map_or_else(none, percent),
            self.rate.map_or_else(none, rate),
            self.ttft.map_or_else(none, seconds),
            self.ttft_p99.map_or_else(none, seconds),
            self.itl.map_or_else(none, seconds),
            match self.events {
                "" => none(),
                events => events.to_owned(),
            },
        ];
        Row {
            cells,
            is_up: state_of(worker) == "up",
        }
    }
}

/// The lines above the table: the router as a whole.
pub(super) fn summary(samples: &Samples) -> [String; 4] {
    let Some(sample) = samples.newest() else {
        return Default::default();
    };
    let workers = &sample.fleet.workers;
    let up = workers
        .iter()
        .filter(|worker| state_of(worker) == "up")
        .count();
    let is_any = |_: &Series| true;
    let growth = |family| samples.rate(family, is_any);
    let percentile = |family, share| {
        samples
            .percentile(None, family, share)
            .map_or_else(none, seconds)
    };
    let of_workers = format!(
        "{}   workers {up}/{} up   running {}   waiting in the router {}",
        if sample.fleet.is_ready {
            "ready"
        } else {
            "NOT READY"
        },
        workers.len(),
        workers
            .iter()
            .map(|worker| u64::from(worker.requests))
            .sum::<u64>(),
        sample.metrics.sum("warmroute_queue_requests", is_any),
    );
    let failed = samples.rate("warmroute_requests_total", |series| {
        match series.label("outcome") {
            Some("complete") => series
                .label("status")
                .is_some_and(|status| status.starts_with('5')),
            outcome => !matches!(
                outcome,
                Some("client_disconnected" | "refused" | "not_queued")
            ),
        }
    });
    let refused = samples.rate("warmroute_requests_total", |series| {
        matches!(series.label("outcome"), Some("refused" | "not_queued"))
    });
    let too_many = samples.rate("warmroute_request_errors_total", |sample| {
        sample.label("status") == Some("429")
    });
    let rates = format!(
        "req/s {}   failed/s {}   refused/s {}, with 429 {}",
        growth("warmroute_requests_total").map_or_else(none, rate),
        failed.map_or_else(none, rate),
        refused.map_or_else(none, rate),
        too_many.map_or_else(none, rate),
    );
    let tokens = format!(
        "tokens/s {}   cached {}   TTFT {} / {}   ITL {} / {}",
        growth("warmroute_generation_tokens_total").map_or_else(none, count),
        samples
            .share(
                "warmroute_cached_prompt_tokens_total",
                "warmroute_prompt_tokens_total"
            )
            .map_or_else(none, percent),
        percentile(TTFT, 0.5),
        percentile(TTFT, 0.99),
        percentile(ITL, 0.5),
        percentile(ITL, 0.99),
    );
    let reasons = samples.reasons();
    let reasons = reasons
        .iter()
        .map(|(reason, share)| format!("{} {}", reason, percent(*share)));
    let reasons: Vec<_> = reasons.collect();
    let decisions = if reasons.is_empty() {
        "decisions -".to_owned()
    } else {
        format!("decisions {}", reasons.join("   "))
    };
    [of_workers, rates, tokens, decisions]
}

fn none() -> String {
    "-".to_owned()
}

/// Names come from a configuration or a discovery: no control characters reach the terminal.
pub(super) fn shown(name: &str) -> String {
    name.chars().filter(|letter| !letter.is_control()).collect()
}

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

/// A rate as text: from a hundred on without decimals, so that the column is narrow.
fn rate(rate: f64) -> String {
    match rate {
        rate if rate < 99.95 => format!("{rate:.1}"),
        rate => count(rate),
    }
}

fn count(count: f64) -> String {
    match count {
        count if count < 10_000.0 => format!("{count:.0}"),
        count if count < 10_000_000.0 => format!("{:.0}k", count / 1e3),
        count => format!("{:.0}M", count / 1e6),
    }
}

fn seconds(seconds: f64) -> String {
    match seconds {
        seconds if seconds < 0.009_95 => format!("{:.1} ms", seconds * 1e3),
        seconds if seconds < 0.999_5 => format!("{:.0} ms", seconds * 1e3),
        seconds => format!("{seconds:.1} s"),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::json;

    use super::*;
    use crate::cli::top::figures::tests::samples;

    pub(in crate::cli::top) fn three_workers() -> Samples {
        let fleet = r#"{"is_ready": true, "workers": [
            {"name": "gpu-b", "role": "both", "health": "up", "circuit_breaker": "closed", "requests": 3,
             "queued_tokens": 12000, "models": ["qwen"], "reported": {"kv_usage": 0.5, "running": 3, "waiting": 0}},
            {"name": "gpu-a", "role": "both", "health": "up", "circuit_breaker": "open", "requests": 1, "models": ["qwen"]},
            {"name": "gpu-c", "role": "prefill", "health": "down", "circuit_breaker": "closed", "models": ["llama"]}]}"#;
        let last = "warmroute_requests_total{worker=\"gpu-b\",outcome=\"complete\"} 8\n\
                    warmroute_requests_total{worker=\"none\",outcome=\"worker_failed\"} 2\n\
                    warmroute_requests_total{worker=\"none\",outcome=\"refused\"} 4\n\
                    warmroute_requests_total{worker=\"none\",outcome=\"not_queued\"} 2\n\
                    warmroute_request_errors_total{status=\"429\",code=\"queue_full\"} 2\n\
                    warmroute_request_errors_total{status=\"404\",code=\"model_not_found\"} 4\n\
                    warmroute_requests_total{worker=\"gpu-c\",status=\"500\",outcome=\"complete\"} 2\n\
                    warmroute_prompt_tokens_total 100\nwarmroute_cached_prompt_tokens_total 75\n\
                    warmroute_generation_tokens_total 400\n\
                    warmroute_routing_decisions_total{reason=\"cold\"} 4\n\
                    warmroute_time_to_first_token_seconds_bucket{worker=\"gpu-b\",le=\"0.2\"} 8\n\
                    warmroute_time_to_first_token_seconds_bucket{worker=\"gpu-b\",le=\"+Inf\"} 8\n\
                    warmroute_kv_state{worker=\"gpu-b\",rank=\"0\",state=\"live\"} 1\n";
        samples(fleet, "", last)
    }

    fn names(state: &State) -> Vec<String> {
        let rows = rows(&three_workers(), state);
        rows.into_iter()
            .map(|mut row| row.cells.swap_remove(0))
            .collect()
    }

    #[test]
    fn the_worst_of_a_worker_is_its_state() {
        let check = |health: &str, breaker: &str, is_draining: bool, expected| {
            let worker =
                json!({"health": health, "circuit_breaker": breaker, "is_draining": is_draining});
            let worker: WorkerRow = serde_json::from_value(worker).unwrap();
            assert_eq!(state_of(&worker), expected);
        };
        check("up", "closed", false, "up");
        check("up", "open", false, "open");
        check("up", "half-open", false, "half-open");
        check("up", "closed", true, "draining");
        check("down", "open", true, "down");
    }

    #[test]
    fn a_row_has_a_workers_state_rates_and_latencies() {
        let rows = rows(&three_workers(), &State::default());
        let cells: Vec<_> = rows.iter().map(|row| row.cells.join(" ")).collect();
        assert_eq!(
            cells,
            [
                "gpu-a both open 1 0 - 0.0 - - - -",
                "gpu-b both up 3 12k 50 % 4.0 100 ms 198 ms - live",
                "gpu-c prefill down 0 0 - 1.0 - - - -",
            ]
        );
        assert_eq!(
            rows.iter().map(|row| row.is_up).collect::<Vec<_>>(),
            [false, true, false]
        );
    }

    #[test]
    fn the_summary_is_the_router_as_a_whole() {
        assert_eq!(
            summary(&three_workers()),
            [
                "ready   workers 1/3 up   running 4   waiting in the router 0",
                "req/s 9.0   failed/s 2.0   refused/s 3.0, with 429 1.0",
                "tokens/s 200   cached 75 %   TTFT 100 ms / 198 ms   ITL - / -",
                "decisions cold 100 %",
            ]
        );
        assert_eq!(summary(&Samples::default()), ["", "", "", ""]);
    }

    #[test]
    fn times_have_a_space_before_their_unit_and_fit_into_six_letters() {
        let check = |value, expected: &str| {
            assert_eq!(seconds(value), expected);
            assert!(expected.len() <= 6, "{expected}");
        };
        check(0.0042, "4.2 ms");
        check(0.00996, "10 ms");
        check(0.025, "25 ms");
        check(0.9994, "999 ms");
        check(0.9996, "1.0 s");
        check(12.3, "12.3 s");
    }

    #[test]
    fn keys_sort_filter_and_quit() {
        let press = |state: &mut State, keys: &str| {
            let mut quits = keys.chars().map(|key| state.on_key(Key::Letter(key), 3, 2));
            quits.any(|quits| quits)
        };
        let mut state = State::default();
        assert!(!press(&mut state, "sss"));
        assert_eq!(state.sort, Column::Running);
        assert_eq!(names(&state), ["gpu-b", "gpu-a", "gpu-c"]);
        press(&mut state, "r");
        assert_eq!(names(&state), ["gpu-c", "gpu-a", "gpu-b"]);
        press(&mut state, "SSS");
        assert_eq!(state.sort, Column::Worker);
        // The letter q is one of a filter's.
        assert!(!press(&mut state, "/Qw"));
        assert_eq!(names(&state), ["gpu-b", "gpu-a"]);
        state.on_key(Key::Backspace, 3, 2);
        state.on_key(Key::Enter, 3, 2);
        assert_eq!((&*state.filter, state.is_editing), ("Q", false));
        state.on_key(Key::Escape, 3, 2);
        assert_eq!(names(&state).len(), 3);
        assert!(press(&mut state, "q"));
    }

    #[test]
    fn scrolling_ends_at_the_last_row() {
        let mut state = State::default();
        let mut press = |key| {
            state.on_key(key, 10, 4);
            state.offset
        };
        assert_eq!(
            [press(Key::Down), press(Key::Up), press(Key::Up)],
            [1, 0, 0]
        );
        assert_eq!(
            [press(Key::PageDown), press(Key::PageDown), press(Key::Down)],
            [4, 6, 6]
        );
        assert_eq!(
            [press(Key::PageUp), press(Key::End), press(Key::Home)],
            [2, 6, 0]
        );
        assert_eq!(state.offset, 0);
        state.on_key(Key::End, 2, 4);
        assert_eq!(state.offset, 0, "all fit");
    }

    #[test]
    fn a_name_cannot_write_to_the_terminal() {
        assert_eq!(shown("gpu\u{1b}[2J\n-0"), "gpu[2J-0");
    }

    #[test]
    fn the_columns_fit_into_80() {
        // With names of 9 letters; a wider terminal shows more of them.
        let others: usize = COLUMNS[1..].iter().map(|(_, _, width)| width + 1).sum();
        assert!(9 + others <= 80, "{others}");
    }
}
