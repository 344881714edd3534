//! Reads `/metrics`: Prometheus' text format, as this router writes it. Pure.

use std::collections::BTreeMap;

/// One line: labels and a value.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    labels: Vec<(String, String)>,
    pub value: f64,
}

impl Series {
    /// `None` if it has no such label.
    pub fn label(&self, name: &str) -> Option<&str> {
        let found = self.labels.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| &**value)
    }
}

/// The series of a page, by the name of their family.
#[derive(Clone, Debug, Default)]
pub struct Families(BTreeMap<String, Vec<Series>>);

impl Families {
    /// The families whose name `keeps` says yes to. What is no series is left out.
    pub fn parse(text: &str, keeps: impl Fn(&str) -> bool) -> Self {
        let mut families: BTreeMap<String, Vec<Series>> = BTreeMap::new();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let name = line.split(['{', ' ']).next().unwrap_or_default();
            if keeps(name)
                && let Some(series) = read(&line[name.len()..])
            {
                families.entry(name.to_owned()).or_default().push(series);
            }
        }
        Self(families)
    }

    pub fn all(&self, family: &str) -> &[Series] {
        self.0.get(family).map_or(&[], Vec::as_slice)
    }

    /// Puts the series of each family in the order of a label's values, for [`Families::with_label`].
    pub fn sort_by_label(&mut self, label: &str) {
        for series in self.0.values_mut() {
            series.sort_by(|a, b| a.label(label).cmp(&b.label(label)));
        }
    }

    /// The series of a family with one value of the label that they are sorted by, without a look at all others.
    pub fn with_label(&self, family: &str, label: &str, value: &str) -> &[Series] {
        let all = self.all(family);
        let start = all.partition_point(|series| series.label(label) < Some(value));
        let found = &all[start..];
        &found[..found.partition_point(|series| series.label(label) == Some(value))]
    }

    /// The sum of the series that a condition holds for.
    pub fn sum(&self, family: &str, holds: impl Fn(&Series) -> bool) -> f64 {
        total(self.all(family).iter().filter(|series| holds(series)))
    }

    /// The [`buckets`] of all series of a histogram.
    pub fn buckets(&self, histogram: &str) -> BTreeMap<u64, f64> {
        buckets(self.all(&format!("{histogram}_bucket")))
    }
}

/// The sum of some series.
pub fn total<'s>(series: impl IntoIterator<Item = &'s Series>) -> f64 {
    // Of no series it is 0, and not the -0 that `sum` begins with.
    let series = series.into_iter();
    series.fold(0.0, |sum, series| sum + series.value)
}

/// The cumulative counts of a histogram's buckets by the bits of their upper bounds, over some series. Bounds are positive, so
/// that their bits are in their order; `+Inf` is the last.
pub fn buckets<'s>(series: impl IntoIterator<Item = &'s Series>) -> BTreeMap<u64, f64> {
    let mut counts = BTreeMap::new();
    for series in series {
        if let Some(Ok(bound)) = series.label("le").map(str::parse::<f64>) {
            *counts.entry(bound.to_bits()).or_default() += series.value;
        }
    }
    counts
}

/// What follows a name: `{a="x",b="y"} 1`, or ` 1`.
fn read(rest: &str) -> Option<Series> {
    let (labels, value) = match rest.strip_prefix('{') {
        None => (Vec::new(), rest),
        Some(rest) => labels(rest)?,
    };
    let value = value.split_whitespace().next()?.parse().ok()?;
    Some(Series { labels, value })
}

/// The labels up to `}`, and what follows.
fn labels(mut rest: &str) -> Option<(Vec<(String, String)>, &str)> {
    let mut labels = Vec::new();
    loop {
        rest = rest.trim_start_matches(',');
        if let Some(after) = rest.strip_prefix('}') {
            return Some((labels, after));
        }
        let (name, after) = rest.split_once("=\"")?;
        let mut value = String::new();
        let mut letters = after.char_indices();
        let end = loop {
            match letters.next()? {
                (_, '\\') => match letters.next()?.1 {
                    'n' => value.push('\n'),
                    other => value.push(other),
                },
                (at, '"') => break at + 1,
                (_, letter) => value.push(letter),
            }
        };
        labels.push((name.to_owned(), value));
        rest = &after[end..];
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn series_are_read_with_escaped_labels_and_others_are_left_out() {
        let text = "# HELP warmroute_requests_total x\n\
             warmroute_requests_total{model=\"a\\\"b}\",worker=\"w 0\"} 3\n\
             warmroute_requests_total{model=\"m\",worker=\"w1\"} 4.5\n\
             warmroute_requests_total{model=\"m} 1\n\
             warmroute_requests_total_other 9\n\
             process_cpu_seconds_total 1\n\
             warmroute_queue_requests 2\n";
        let kept = ["warmroute_requests_total", "warmroute_queue_requests"];
        let families = Families::parse(text, |name| kept.contains(&name));
        let found = families.all("warmroute_requests_total");
        assert_eq!(found.len(), 2);
        assert_eq!(
            (found[0].label("model"), found[0].label("worker")),
            (Some("a\"b}"), Some("w 0"))
        );
        assert_eq!(families.sum("warmroute_requests_total", |_| true), 7.5);
        assert_eq!(
            families.sum("warmroute_requests_total", |series| series.label("worker")
                == Some("w1")),
            4.5
        );
        assert_eq!(families.sum("warmroute_queue_requests", |_| true), 2.0);
        assert_eq!(families.all("process_cpu_seconds_total"), []);
    }

    #[test]
    fn the_series_of_one_worker_are_found_among_those_of_others() {
        let text = "a{worker=\"w10\"} 1\na{worker=\"w1\",x=\"1\"} 2\na{x=\"1\"} 3\na{worker=\"w0\"} 4\n\
                    a{worker=\"w1\",x=\"2\"} 5\n";
        let mut families = Families::parse(text, |_| true);
        families.sort_by_label("worker");
        let found = |worker: &str| {
            let series = families.with_label("a", "worker", worker).iter();
            series.map(|series| series.value).collect::<Vec<_>>()
        };
        assert_eq!(found("w1"), [2.0, 5.0]);
        assert_eq!((found("w0"), found("w10")), (vec![4.0], vec![1.0]));
        assert_eq!((found(""), found("w2")), (vec![], vec![]));
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_left_out(text in "warmroute_kv_state[{}\"=,\\\\a1 \n]{0,40}") {
            let _ = Families::parse(&text, |_| true);
        }
    }
}
