//! What a fleet leaves on the table: rules over the pages and metrics of a running router. Pure.

mod broken;
mod choice;
mod engines;
mod finding;
mod idle;
mod observed;
mod settings;
mod transfers;
mod versions;
mod workers;

use std::fmt::Write as _;

pub use self::finding::Finding;
pub use self::observed::Observed;

/// Everything that the rules find: what is broken first, then the most expensive first.
pub fn examine(observed: &Observed) -> Vec<Finding> {
    let mut findings = broken::examine(observed);
    findings.extend(engines::examine(observed));
    findings.extend(settings::examine(observed));
    findings.extend(idle::examine(observed));
    findings.extend(choice::examine(observed));
    findings.sort_by(|a, b| {
        let by_cost = || b.cost.total_cmp(&a.cost).then_with(|| a.rule.cmp(b.rule));
        b.is_broken.cmp(&a.is_broken).then_with(by_cost)
    });
    findings
}

/// Rules over what changes from one second to the next.
const OF_A_MOMENT: [&str; 3] = [
    "workers_idle_beside_busy",
    "slots_unknown",
    "kv_transfers_stopped",
];

fn is_of_a_moment(finding: &Finding) -> bool {
    OF_A_MOMENT.contains(&finding.rule)
}

/// True if a second look, some seconds later, may see some of the findings no more.
pub fn may_pass(findings: &[Finding]) -> bool {
    findings.iter().any(is_of_a_moment)
}

/// The findings of a second look, without what may pass and was not found in the first one.
pub fn lasting(first: &[Finding], mut second: Vec<Finding>) -> Vec<Finding> {
    let was_found = |finding: &Finding| {
        // Not by what it says: in a busy fleet that lists other workers from moment to moment.
        let is_same =
            |before: &Finding| (before.rule, &before.model) == (finding.rule, &finding.model);
        first.iter().any(is_same)
    };
    second.retain(|finding| !is_of_a_moment(finding) || was_found(finding));
    second
}

pub fn text(findings: &[Finding], observed: &Observed) -> String {
    let workers = observed.fleet.workers.len();
    let mut text = String::new();
    // Writing to memory cannot fail.
    for (index, finding) in findings.iter().enumerate() {
        let Finding {
            rule,
            is_broken,
            problem,
            effect,
            change,
            ..
        } = finding;
        let urgent = if *is_broken { "BROKEN: " } else { "" };
        let change = change.replace('\n', "\n             ");
        let _ = write!(
            text,
            "{}. {urgent}{problem}\n   costs:    {effect}\n   change:   {change}\n   rule:     {rule}\n\n",
            index + 1,
        );
    }
    let workers = match workers {
        1 => "1 worker".to_owned(),
        count => format!("{count} workers"),
    };
    let _ = match findings.len() {
        0 => writeln!(text, "{workers}: nothing found"),
        1 => writeln!(text, "{workers}: 1 finding"),
        count => writeln!(text, "{workers}: {count} findings, the worst first"),
    };
    text
}

#[cfg(test)]
mod tests;
