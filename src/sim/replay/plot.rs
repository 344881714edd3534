//! The results of a replay as an SVG picture: the distribution of the time to first token, and the cached ratio. Pure.
//! No text in it comes from input, so nothing needs escaping.

use std::fmt::Write;
use std::time::Duration;

use super::policy::ComparedPolicy;
use super::results::{PolicyResult, Report, seconds};
use crate::routing::Policy;
use crate::sim::report;

const WIDTH: f64 = 1_000.0;
const ROW: f64 = 34.0;
/// The box of the distribution. Its bottom depends on the number of policies.
const LEFT: f64 = 56.0;
const TOP: f64 = 84.0;
const RIGHT: f64 = 500.0;
/// Left end of the bars, and the length of a bar of 100 %.
const BARS: f64 = 700.0;
const BAR: f64 = 200.0;
/// Number of segments of a curve.
const STEPS: usize = 200;

const STYLE: &str = "text { font: 13px system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif; fill: #343a40 } \
    .title { font-size: 16px; font-weight: 600 } .small { font-size: 12px; fill: #6c757d } \
    .end { text-anchor: end } .middle { text-anchor: middle } .strong { font-weight: 600 } \
    .grid { stroke: #e3e6ea } .bound { stroke: #343a40; stroke-dasharray: 2 3 } \
    .curve { fill: none; stroke-linejoin: round; stroke-width: 1.8 } .ours { stroke-width: 3.2 } \
    .model { stroke-dasharray: 7 4 } .halo { paint-order: stroke; stroke: #fff; stroke-width: 4px }";

/// Draws the picture; it has its own background and is readable on light and dark pages.
pub(super) fn svg(report: &Report, caption: &str) -> String {
    let rows = report.policies.len().max(5) as f64;
    let bottom = TOP + rows * ROW;
    let height = bottom + 82.0;
    let axis = Axis::over(&report.policies);
    let mut drawing = String::new();
    let mut put = |shape: String| {
        // Writing to a String cannot fail.
        let _ = writeln!(drawing, "{shape}");
    };
    put(format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\">"
    ));
    put(format!("<style>{STYLE}</style>"));
    put(format!(
        "<rect width=\"{WIDTH}\" height=\"{height}\" rx=\"8\" fill=\"#fff\"/>"
    ));
    put(text(LEFT, 30.0, "title", "Time to first token"));
    put(text(
        LEFT,
        52.0,
        "small",
        "share of requests with a TTFT of at most ...",
    ));
    let left = RIGHT + 44.0;
    put(text(left, 30.0, "title", "Prompt tokens from cache"));
    put(text(left, 52.0, "small", "and the mean TTFT"));
    for part in [0.0, 0.25, 0.5, 0.75, 1.0] {
        let y = bottom - part * (bottom - TOP);
        put(line(LEFT, y, RIGHT, y, "grid"));
        let label = format!("{:.0} %", part * 100.0);
        put(text(LEFT - 8.0, y + 4.0, "small end", &label));
    }
    for tick in axis.ticks() {
        let x = axis.x(tick);
        put(line(x, TOP, x, bottom, "grid"));
        let label = format!("{tick} s");
        put(text(x, bottom + 20.0, "small middle", &label));
    }
    // In reverse, so that the first policy is drawn on top.
    for row in report.policies.iter().rev() {
        put(curve(row, &axis, bottom));
    }
    let bound = BARS + BAR * report.pooled_bound;
    put(line(bound, TOP - 6.0, bound, bottom + 4.0, "bound"));
    for (index, row) in report.policies.iter().enumerate() {
        put(bar(row, TOP + index as f64 * ROW));
    }
    let label = format!(
        "a single cache of the fleet's size: {}",
        report::percent(report.pooled_bound)
    );
    put(text(bound, bottom + 20.0, "small middle", &label));
    put(text(LEFT, bottom + 46.0, "small", caption));
    if report.policies.iter().any(|row| row.is_model) {
        let note =
            "dashed, *: models of other routers' formulas, with the same cache index and loads";
        put(text(LEFT, bottom + 66.0, "small", note));
    }
    drawing.push_str("</svg>\n");
    drawing
}

/// A logarithmic axis of seconds.
struct Axis {
    /// Both ends, as powers of ten.
    first: f64,
    last: f64,
}

impl Axis {
    /// Covers p5 to p99 of all policies, starting at a whole power of ten.
    fn over(rows: &[PolicyResult]) -> Self {
        let times = |percent| {
            let time =
                move |row: &PolicyResult| report::percentile(&row.times_to_first_token, percent);
            rows.iter().map(move |row| time(row).as_secs_f64())
        };
        let least = times(5).fold(f64::INFINITY, f64::min).clamp(0.001, 1e6);
        let most = times(99).fold(0.001, f64::max).min(1e9);
        let first = least.log10().floor();
        Self {
            first,
            last: (most * 1.2).log10().max(first + 1.0),
        }
    }

    fn ticks(&self) -> impl Iterator<Item = f64> + use<> {
        (self.first as i32..=self.last.floor() as i32).map(|power| 10f64.powi(power))
    }

    fn x(&self, seconds: f64) -> f64 {
        let part = (seconds.max(1e-9).log10() - self.first) / (self.last - self.first);
        LEFT + part.clamp(0.0, 1.0) * (RIGHT - LEFT)
    }
}

fn curve(row: &PolicyResult, axis: &Axis, bottom: f64) -> String {
    let mut points = String::new();
    for step in 0..=STEPS {
        let part = step as f64 / STEPS as f64;
        let last = row.times_to_first_token.len().saturating_sub(1);
        let index = (part * last as f64).round() as usize;
        let time = row.times_to_first_token.get(index).copied();
        let x = axis.x(time.unwrap_or(Duration::ZERO).as_secs_f64());
        let y = bottom - part * (bottom - TOP);
        let _ = write!(points, "{x:.1},{y:.1} ");
    }
    let kind = if row.is_model {
        "curve model"
    } else if is_highlighted(row) {
        "curve ours"
    } else {
        "curve"
    };
    format!(
        "<polyline class=\"{kind}\" stroke=\"{}\" points=\"{}\"/>",
        color(row),
        points.trim_end()
    )
}

/// A policy's legend entry, its bar of the cached ratio, and its mean TTFT.
fn bar(row: &PolicyResult, y: f64) -> String {
    let base = y + ROW / 2.0;
    let (color, length) = (color(row), BAR * row.cached_ratio);
    let dashes = if row.is_model { " model" } else { "" };
    let mark = if row.is_model { " *" } else { "" };
    let weight = if is_highlighted(row) {
        "halo strong"
    } else {
        "halo"
    };
    let left = RIGHT + 44.0;
    [
        format!(
            "<line class=\"curve{dashes}\" stroke=\"{color}\" stroke-width=\"3\" x1=\"{left}\" y1=\"{base}\" x2=\"{}\" y2=\"{base}\"/>",
            left + 20.0,
        ),
        text(left + 28.0, base + 4.5, weight, &format!("{}{mark}", row.policy)),
        format!(
            "<rect x=\"{BARS}\" y=\"{}\" width=\"{length:.1}\" height=\"18\" rx=\"2\" fill=\"{color}\"/>",
            base - 9.0
        ),
        text(
            BARS + length + 8.0,
            base + 4.5,
            weight,
            &report::percent(row.cached_ratio),
        ),
        text(
            WIDTH - 16.0,
            base + 4.5,
            &format!("{weight} end"),
            &seconds(row.ttft_mean_seconds),
        ),
    ]
    .join("\n")
}

fn is_highlighted(row: &PolicyResult) -> bool {
    row.policy == ComparedPolicy::Router(Policy::CacheAware).name()
}

/// Colours that differ also for those who do not distinguish red from green.
fn color(row: &PolicyResult) -> &'static str {
    const COLORS: [&str; ComparedPolicy::ALL.len()] = [
        "#e8590c", "#1c7ed6", "#15aabf", "#7048e8", "#868e96", "#adb5bd", "#2b8a3e", "#94d82d",
        "#862e9c", "#f08c00", "#c2255c", "#5c940d", "#1864ab",
    ];
    let colors = ComparedPolicy::ALL.iter().zip(COLORS);
    let mut found = colors.filter(|(policy, _)| policy.name() == row.policy);
    found.next().map_or("#343a40", |(_, color)| color)
}

fn text(x: f64, y: f64, class: &str, words: &str) -> String {
    format!("<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\">{words}</text>")
}

fn line(x1: f64, y1: f64, x2: f64, y2: f64, class: &str) -> String {
    format!("<line class=\"{class}\" x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\"/>")
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::sim::replay::formula::Formula;
    use crate::sim::replay::results::TraceSummary;
    use crate::sim::replay::results::tests::row;

    fn report(policies: Vec<PolicyResult>) -> Report {
        Report {
            trace: TraceSummary::of(&[]),
            settings: Value::Null,
            pooled_bound: 0.5,
            infinite_bound: 0.6,
            policies,
        }
    }

    #[test]
    fn a_picture_has_a_curve_and_a_bar_for_each_policy() {
        let rows = vec![
            row(ComparedPolicy::Router(Policy::CacheAware), &[300, 100, 200]),
            row(ComparedPolicy::Model(Formula::LongestPrefix), &[9_000]),
        ];
        let drawing = svg(&report(rows), "a test");
        for (part, count) in [
            ("<polyline", 2),
            ("rx=\"2\"", 2),
            ("class=\"curve ours\"", 1),
            (">0.1 s<", 1),
            (">10 s<", 1),
            (">longest_prefix *<", 1),
            ("</svg>", 1),
        ] {
            assert_eq!(drawing.matches(part).count(), count, "{part}");
        }
    }

    #[test]
    fn slower_is_further_right_and_nothing_is_outside_the_box() {
        let rows = [row(
            ComparedPolicy::Router(Policy::Random),
            &[20, 500, 40_000],
        )];
        let axis = Axis::over(&rows);
        let xs = [0.0, 0.01, 0.02, 40.0, 100.0, 1e6].map(|seconds| axis.x(seconds));
        assert!(xs.is_sorted(), "{xs:?}");
        assert_eq!((xs[1], xs[4]), (LEFT, RIGHT));
        assert!(xs[3] < RIGHT);
    }

    #[test]
    fn a_report_without_requests_can_be_drawn() {
        let drawing = svg(
            &report(vec![row(ComparedPolicy::Router(Policy::Random), &[])]),
            "",
        );
        assert!(!drawing.contains("NaN") && !drawing.contains("inf"));
    }
}
