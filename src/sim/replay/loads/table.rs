//! The tables of `warmroute replay --loads`. Pure.

use serde::Serialize;

use crate::sim::replay::policy::ComparedPolicy;
use crate::sim::replay::results::{MODEL_NOTE, PolicyResult, seconds};
use crate::sim::report;

#[derive(Clone, Debug)]
pub(in crate::sim::replay) struct Compared {
    pub(in crate::sim::replay) loads: Vec<ComparedLoad>,
    pub(super) policies: Vec<ComparedPolicy>,
}

#[derive(Clone, Debug, Serialize)]
pub(in crate::sim::replay) struct ComparedLoad {
    pub(super) load: String,
    /// By seed, the result of each policy.
    pub(super) seeds: Vec<Vec<PolicyResult>>,
}

/// More than the best by this counts.
const NOTABLE_RATIO: f64 = 1.03;

/// A mean time of a load, by policy.
struct Row<'a> {
    load: &'a str,
    best_seconds: f64,
    /// The ratio of each policy's mean to the best.
    ratios: Vec<f64>,
}

/// For the whole answer and for the TTFT: each load's best mean and the policies' ratios to it; then each policy's ratios
/// over all loads.
pub(in crate::sim::replay) fn tables(compared: &Compared) -> String {
    let times = [
        (
            "whole answer",
            rows(compared, |result| result.answer_mean_seconds),
        ),
        ("TTFT", rows(compared, |result| result.ttft_mean_seconds)),
    ];
    let names: Vec<String> = compared
        .policies
        .iter()
        .map(|policy| name(*policy))
        .collect();
    let mut text = String::new();
    for (what, rows) in &times {
        let mut cells = vec![vec![what.to_string(), "best".to_owned()]];
        cells[0].extend(names.iter().cloned());
        cells.extend(rows.iter().map(Row::cells));
        text.push_str(&report::aligned(&cells));
        text.push('\n');
    }
    text.push_str(&summary(&names, &times));
    if compared.policies.iter().any(|policy| policy.is_model()) {
        text.push_str(MODEL_NOTE);
    }
    text
}

fn summary(names: &[String], times: &[(&str, Vec<Row<'_>>); 2]) -> String {
    const HEADS: [[&str; 7]; 2] = [
        ["ratio to the best", "whole", "", "", "TTFT", "", ""],
        ["policy", "mean", "worst", "> 3 %", "mean", "worst", "> 3 %"],
    ];
    let heads = HEADS.map(|line| line.map(str::to_owned).to_vec());
    let mut cells = Vec::from(heads);
    for (policy, name) in names.iter().enumerate() {
        let mut line = vec![name.clone()];
        for (_, rows) in times {
            let ratios: Vec<f64> = rows.iter().map(|row| row.ratios[policy]).collect();
            let worst = ratios.iter().copied().fold(1.0, f64::max);
            let notable = ratios.iter().filter(|ratio| **ratio > NOTABLE_RATIO);
            line.push(format!("{:.3}", geometric_mean(&ratios)));
            line.push(format!("{worst:.2}"));
            line.push(format!("{} of {}", notable.count(), ratios.len()));
        }
        cells.push(line);
    }
    report::aligned(&cells)
}

fn rows(compared: &Compared, time: fn(&PolicyResult) -> f64) -> Vec<Row<'_>> {
    let row = |load: &'_ ComparedLoad| {
        let of_policy = |policy| {
            let seeds = load.seeds.iter().map(|results| time(&results[policy]));
            seeds.sum::<f64>() / load.seeds.len().max(1) as f64
        };
        let means: Vec<f64> = (0..compared.policies.len()).map(of_policy).collect();
        let best = means.iter().copied().fold(f64::INFINITY, f64::min);
        (best, means)
    };
    let loads = compared.loads.iter();
    loads
        .map(|load| {
            let (best_seconds, means) = row(load);
            Row {
                load: &load.load,
                best_seconds,
                ratios: means.iter().map(|mean| mean / best_seconds).collect(),
            }
        })
        .collect()
}

impl Row<'_> {
    fn cells(&self) -> Vec<String> {
        let mut cells = vec![self.load.to_owned(), seconds(self.best_seconds)];
        cells.extend(self.ratios.iter().map(|ratio| format!("{ratio:.2}")));
        cells
    }
}

fn name(policy: ComparedPolicy) -> String {
    let mark = if policy.is_model() { " *" } else { "" };
    format!("{}{mark}", policy.name())
}

fn geometric_mean(ratios: &[f64]) -> f64 {
    let logarithms = ratios.iter().map(|ratio| ratio.ln());
    (logarithms.sum::<f64>() / ratios.len().max(1) as f64).exp()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing::Policy;
    use crate::sim::replay::formula::Formula;
    use crate::sim::replay::results::tests::row;

    #[test]
    fn each_load_has_the_ratios_to_its_best_policy_and_each_policy_their_mean() {
        let policies = vec![
            ComparedPolicy::Router(Policy::CacheAware),
            ComparedPolicy::Model(Formula::Lmetric),
        ];
        let load = |name: &str, first: [u64; 2]| ComparedLoad {
            load: name.to_owned(),
            seeds: vec![vec![
                row(policies[0], &[first[0]]),
                row(policies[1], &[first[1]]),
            ]],
        };
        let loads = vec![load("one", [1_000, 2_000]), load("two", [6_000, 1_000])];
        let expected = "whole answer     best   cache_aware   lmetric *
one            5.00 s          1.00        1.20
two            5.00 s          2.00        1.00

TTFT     best   cache_aware   lmetric *
one    1.00 s          1.00        2.00
two    1.00 s          6.00        1.00

ratio to the best   whole                     TTFT                 
policy               mean   worst    > 3 %    mean   worst    > 3 %
cache_aware         1.414    2.00   1 of 2   2.449    6.00   1 of 2
lmetric *           1.095    1.20   1 of 2   1.414    2.00   1 of 2
* a model of another router's formula, with the same cache index and loads
";
        assert_eq!(tables(&Compared { loads, policies }), expected);
    }
}
