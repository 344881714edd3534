//! A metrics registry whose constructors create a metric and register it in one step.
//!
//! Each part owns a struct of its metrics and is handed the registry when it is built. Handles with
//! labels are resolved once (per worker, per model), so that a request only adds to atomics.
//!
//! Known limit: `prometheus` tells the series of a family apart by a hash of their label values one after the other,
//! with nothing between them. Two series whose values are the same text in a row are one, which has the labels of the
//! first. In a family by model and worker, model `sql1` at worker `11` and model `sql11` at worker `1` are one. Whoever
//! removes one removes both, and the other is not shown until its handles are resolved again.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fmt::Write as _;
use std::sync::Arc;

use parking_lot::Mutex;
use prometheus::core::{Collector, MetricVec, MetricVecBuilder};
use prometheus::proto::MetricFamily;
use prometheus::{
    Counter, Encoder, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter,
    IntCounterVec, IntGauge, IntGaugeVec, Opts, TextEncoder,
};

/// All metrics of one process (or of one test).
#[derive(Clone, Debug, Default)]
pub struct Registry {
    metrics: prometheus::Registry,
    shared: Arc<Shared>,
}

/// A metric's type, and what reads it.
type Registered = (&'static str, Box<dyn Collector>);

#[derive(Default)]
struct Shared {
    collectors: Mutex<BTreeMap<String, Registered>>,
    on_scrape: Mutex<Vec<Box<dyn Fn() + Send>>>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

impl Registry {
    pub fn counter(&self, name: &str, help: &str) -> IntCounter {
        self.register("counter", IntCounter::new(name, help))
    }

    /// A counter of fractions, such as seconds.
    pub fn real_counter(&self, name: &str, help: &str) -> Counter {
        self.register("counter", Counter::new(name, help))
    }

    pub fn counters(&self, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
        self.register("counter", IntCounterVec::new(Opts::new(name, help), labels))
    }

    pub fn gauge(&self, name: &str, help: &str) -> IntGauge {
        self.register("gauge", IntGauge::new(name, help))
    }

    /// A gauge of fractions.
    pub fn real_gauge(&self, name: &str, help: &str) -> Gauge {
        self.register("gauge", Gauge::new(name, help))
    }

    pub fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
        self.register("gauge", IntGaugeVec::new(Opts::new(name, help), labels))
    }

    /// Gauges of fractions.
    pub fn real_gauges(&self, name: &str, help: &str, labels: &[&str]) -> GaugeVec {
        self.register("gauge", GaugeVec::new(Opts::new(name, help), labels))
    }

    pub fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> Histogram {
        let options = HistogramOpts::new(name, help).buckets(buckets.to_vec());
        self.register("histogram", Histogram::with_opts(options))
    }

    pub fn histograms(
        &self,
        name: &str,
        help: &str,
        buckets: &[f64],
        labels: &[&str],
    ) -> HistogramVec {
        let options = HistogramOpts::new(name, help).buckets(buckets.to_vec());
        self.register("histogram", HistogramVec::new(options, labels))
    }

    /// Calls `update` before each scrape, for metrics that are read from elsewhere.
    pub fn on_scrape(&self, update: impl Fn() + Send + 'static) {
        self.shared.on_scrape.lock().push(Box::new(update));
    }

    /// The Prometheus text format, version 0.0.4.
    pub fn text(&self) -> String {
        for update in &*self.shared.on_scrape.lock() {
            update();
        }
        let mut text = Vec::new();
        // Writing to a Vec cannot fail.
        let _ = TextEncoder::new().encode(&self.metrics.gather(), &mut text);
        String::from_utf8(text).unwrap_or_default()
    }

    /// One family as it is now, without the updates of [`Registry::on_scrape`]. `None` if there is no such metric.
    pub fn family(&self, name: &str) -> Option<MetricFamily> {
        let collectors = self.shared.collectors.lock();
        let (_, collector) = collectors.get(name)?;
        let families = collector.collect();
        families.into_iter().find(|family| family.name() == name)
    }

    /// A Markdown table of every registered metric, whether or not it has a value yet.
    pub fn reference(&self) -> String {
        let mut table = "| metric | type | labels | meaning |\n|---|---|---|---|\n".to_owned();
        for (name, (kind, collector)) in &*self.shared.collectors.lock() {
            for desc in collector.desc() {
                let labels = desc.variable_labels.iter();
                let labels: Vec<String> = labels.map(|label| format!("`{label}`")).collect();
                let (labels, help) = (labels.join(", "), desc.help.replace('|', "\\|"));
                let _ = writeln!(table, "| `{name}` | {kind} | {labels} | {help} |");
            }
        }
        table
    }

    fn register<C: Collector + Clone + 'static>(
        &self,
        kind: &'static str,
        metric: prometheus::Result<C>,
    ) -> C {
        let metric = metric.expect("metric names and labels are literals");
        for desc in metric.desc() {
            let collector: Box<dyn Collector> = Box::new(metric.clone());
            let mut collectors = self.shared.collectors.lock();
            collectors.insert(desc.fq_name.clone(), (kind, collector));
        }
        self.metrics
            .register(Box::new(metric.clone()))
            .expect("each metric is registered once");
        metric
    }
}

/// Removes the series of a family by the value of one of its labels. Looks through all of its series.
pub fn remove_series<B: MetricVecBuilder + 'static>(
    family: &MetricVec<B>,
    label: &'static str,
    is_gone: impl Fn(&str) -> bool,
) {
    let mut found = FoundSeries::by(label);
    found.find(family, is_gone);
    for remove in found.by_value.into_values().flatten() {
        remove();
    }
}

type Removal = Box<dyn FnOnce()>;

/// Series of any families that are to be removed, by the value of one of their labels. To find them takes a while,
/// since all series of a family are looked through. To remove those of one value does not, so a lock may be held.
pub struct FoundSeries {
    label: &'static str,
    by_value: HashMap<String, Vec<Removal>>,
}

impl fmt::Debug for FoundSeries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FoundSeries").finish_non_exhaustive()
    }
}

impl FoundSeries {
    /// No series yet.
    pub fn by(label: &'static str) -> Self {
        Self {
            label,
            by_value: HashMap::new(),
        }
    }

    /// Finds the series of a family whose label has such a value.
    pub fn find<B: MetricVecBuilder + 'static>(
        &mut self,
        family: &MetricVec<B>,
        is_gone: impl Fn(&str) -> bool,
    ) {
        for mut collected in family.collect() {
            for mut series in collected.take_metric() {
                let labels = series.take_label();
                let pair = labels.iter().find(|pair| pair.name() == self.label);
                let Some(value) = pair.map(|pair| pair.value().to_owned()) else {
                    continue;
                };
                if !is_gone(&value) {
                    continue;
                }
                let family = family.clone();
                let remove = move || {
                    let pairs = labels.iter();
                    let labels: HashMap<&str, &str> =
                        pairs.map(|pair| (pair.name(), pair.value())).collect();
                    // Somebody else may have removed it meanwhile.
                    let _ = family.remove(&labels);
                };
                let removals = self.by_value.entry(value).or_default();
                removals.push(Box::new(remove));
            }
        }
    }

    /// Removes the series with one value of the label.
    pub fn remove(&mut self, value: &str) {
        let removals = self.by_value.remove(value);
        for remove in removals.into_iter().flatten() {
            remove();
        }
    }
}

/// Counts something in a gauge for as long as it lives.
#[must_use = "dropping it ends the count"]
#[derive(Debug)]
pub struct Counted(IntGauge);

impl Counted {
    pub fn new(gauge: &IntGauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Makes a struct of metrics from a table, and its `new`, which registers all of them:
///
/// ```ignore
/// metric_table! {
///     #[derive(Clone, Debug)]
///     pub(super) struct Metrics {
///         pub(super) open: gauge "doors_open" "Doors that are open.",
///         closed: counters "doors_closed_total" ["reason"] "Doors that were closed, by reason.",
///         seconds: histograms "door_seconds" ["floor"] in SECONDS "Time that a door was open, by floor.",
///     } and {
///         /// A field that is no metric. It begins as its default.
///         peak: Arc<AtomicI64>,
///     }
/// }
/// ```
///
/// A row has the field, the method of [`Registry`] that makes the metric, its name, its labels, the buckets of a histogram
/// and its help, as that method takes them.
macro_rules! metric_table {
    (
        $(#[$attribute:meta])*
        $vis:vis struct $table:ident {
            $(
                $(#[$doc:meta])*
                $field_vis:vis $field:ident: $method:ident $name:literal $([$($label:literal),*])? $(in $buckets:ident)? $help:literal,
            )*
        } $(and {
            $($(#[$other_doc:meta])* $other_vis:vis $other:ident: $other_type:ty,)*
        })?
    ) => {
        $(#[$attribute])*
        $vis struct $table {
            $($(#[$doc])* $field_vis $field: $crate::observe::metrics::metric_type!($method),)*
            $($($(#[$other_doc])* $other_vis $other: $other_type,)*)?
        }

        impl $table {
            $vis fn new(registry: &$crate::observe::metrics::Registry) -> Self {
                Self {
                    $($field: registry.$method($name, $help $(, $buckets)? $(, &[$($label),*])?),)*
                    $($($other: Default::default(),)*)?
                }
            }
        }
    };
}
pub(crate) use metric_table;

/// What a method of [`Registry`] returns.
macro_rules! metric_type {
    (counter) => {
        prometheus::IntCounter
    };
    (counters) => {
        prometheus::IntCounterVec
    };
    (gauge) => {
        prometheus::IntGauge
    };
    (gauges) => {
        prometheus::IntGaugeVec
    };
    (real_gauges) => {
        prometheus::GaugeVec
    };
    (histogram) => {
        prometheus::Histogram
    };
    (histograms) => {
        prometheus::HistogramVec
    };
}
pub(crate) use metric_type;

/// Makes an enum whose variants have a word each, for logs and labels of metrics, with `as_str`, the list `ALL` and, where
/// it says so, `Display`:
///
/// ```ignore
/// words! {
///     #[derive(Clone, Copy, Debug)]
///     pub(super) enum Door: Display {
///         Open = "open",
///         /// Locked, too.
///         Closed = "closed",
///     }
/// }
/// ```
macro_rules! words {
    (
        $(#[$attribute:meta])*
        $vis:vis enum $name:ident $(: $display:ident)? {
            $($(#[$doc:meta])* $variant:ident = $word:literal,)*
        }
    ) => {
        $(#[$attribute])*
        $vis enum $name {
            $($(#[$doc])* $variant,)*
        }

        impl $name {
            #[allow(dead_code, reason = "not every list is used")]
            $vis const ALL: [Self; [$($word),*].len()] = [$(Self::$variant),*];

            $vis fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $word,)*
                }
            }
        }

        $(impl std::fmt::$display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        })?
    };
}
pub(crate) use words;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_shows_in_the_text_with_its_labels() {
        let registry = Registry::default();
        let counters = registry.counters("things_total", "Things.", &["kind"]);
        counters.with_label_values(&["odd"]).inc_by(3);
        assert!(registry.text().contains("things_total{kind=\"odd\"} 3"));
    }

    #[test]
    fn series_are_removed_by_one_of_their_labels() {
        let registry = Registry::default();
        let counters = registry.counters("things_total", "Things.", &["kind", "at"]);
        let seconds = registry.histograms("thing_seconds", "Time.", &[1.0], &["kind"]);
        for (kind, at) in [("odd", "here"), ("odd", "there"), ("even", "here")] {
            counters.with_label_values(&[kind, at]).inc();
            seconds.with_label_values(&[kind]).observe(0.5);
        }
        remove_series(&counters, "kind", |kind| kind == "odd");
        remove_series(&seconds, "kind", |kind| kind == "odd");
        let text = registry.text();
        assert!(!text.contains("odd"));
        assert!(text.contains("things_total{at=\"here\",kind=\"even\"} 1"));
        assert!(text.contains("thing_seconds_count{kind=\"even\"} 1"));
    }

    #[test]
    fn series_of_several_families_are_found_first_and_removed_value_by_value() {
        let registry = Registry::default();
        let counters = registry.counters("things_total", "Things.", &["kind", "at"]);
        let seconds = registry.histograms("thing_seconds", "Time.", &[1.0], &["kind"]);
        for kind in ["odd", "even", "zero"] {
            counters.with_label_values(&[kind, "here"]).inc();
            counters.with_label_values(&[kind, "there"]).inc();
            seconds.with_label_values(&[kind]).observe(0.5);
        }
        let mut found = FoundSeries::by("kind");
        found.find(&counters, |kind| kind != "zero");
        found.find(&seconds, |kind| kind != "zero");
        let is_shown = |kind: &str| registry.text().contains(&format!("kind=\"{kind}\""));
        assert!(is_shown("odd"));
        for kind in ["odd", "zero"] {
            found.remove(kind);
        }
        assert_eq!(["odd", "even", "zero"].map(is_shown), [false, true, true]);
    }

    /// If this fails, the limit is no more: remove it from the head of this file.
    #[test]
    fn label_values_that_are_the_same_text_in_a_row_are_one_series() {
        let registry = Registry::default();
        let counters = registry.counters("things_total", "Things.", &["kind", "at"]);
        counters.with_label_values(&["odd1", "11"]).inc();
        counters.with_label_values(&["odd11", "1"]).inc();
        let text = registry.text();
        assert!(text.contains("things_total{at=\"11\",kind=\"odd1\"} 2"));
        remove_series(&counters, "kind", |kind| kind == "odd1");
        assert!(!registry.text().contains("odd"));
    }

    #[test]
    fn one_family_is_read_without_the_others() {
        let registry = Registry::default();
        let counters = registry.counters("things_total", "Things.", &["kind"]);
        registry.gauge("thing_size", "Size.");
        registry.gauge("others", "Others.");
        counters.with_label_values(&["odd"]).inc_by(3);
        let family = registry.family("things_total").unwrap();
        assert_eq!(family.get_metric().len(), 1);
        assert!(registry.family("thing").is_none());
    }

    #[test]
    fn the_reference_lists_metrics_that_have_no_value_yet() {
        let registry = Registry::default();
        registry.counters("things_total", "Things, by kind.", &["kind", "size"]);
        let row = "| `things_total` | counter | `kind`, `size` | Things, by kind. |";
        assert!(registry.reference().contains(row));
    }

    metric_table! {
        struct Things {
            things: counters "things_total" ["kind"] "Things.",
            seconds: histogram "thing_seconds" in SECONDS "Time.",
        } and {
            other: u32,
        }
    }
    const SECONDS: &[f64] = &[1.0];

    #[test]
    fn a_table_registers_its_metrics() {
        let registry = Registry::default();
        let things = Things::new(&registry);
        things.things.with_label_values(&["odd"]).inc();
        things.seconds.observe(0.5);
        assert_eq!(things.other, 0);
        let text = registry.text();
        assert!(text.contains("things_total{kind=\"odd\"} 1"));
        assert!(text.contains("thing_seconds_bucket{le=\"1\"} 1"));
    }

    words! {
        #[derive(Clone, Copy)]
        enum Door: Display {
            Open = "open",
            /// Locked, too.
            Closed = "closed",
        }
    }

    #[test]
    fn an_enum_lists_its_words() {
        assert_eq!(Door::ALL.map(Door::as_str), ["open", "closed"]);
        assert_eq!(Door::Closed.to_string(), "closed");
    }
}
