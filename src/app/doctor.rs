//! What a fleet leaves on the table: rules over the pages and metrics of a running router. Pure.

mod choice;
mod engines;
mod finding;
mod idle;
mod observed;
mod settings;
mod versions;
mod workers;

use std::fmt::Write as _;

pub use self::finding::Finding;
pub use self::observed::Observed;

/// Everything that the rules find, the most expensive first.
pub fn examine(observed: &Observed) -> Vec<Finding> {
    let mut findings = engines::examine(observed);
    findings.extend(settings::examine(observed));
    findings.extend(idle::examine(observed));
    findings.extend(choice::examine(observed));
    findings.sort_by(|a, b| b.cost.total_cmp(&a.cost).then_with(|| a.rule.cmp(b.rule)));
    findings
}

/// For people.
pub fn text(findings: &[Finding], observed: &Observed) -> String {
    let workers = observed.fleet.workers.len();
    let mut text = String::new();
    // Writing to memory cannot fail.
    for (index, finding) in findings.iter().enumerate() {
        let Finding {
            rule,
            problem,
            effect,
            change,
            ..
        } = finding;
        let change = change.replace('\n', "\n             ");
        let _ = write!(
            text,
            "{}. {problem}\n   costs:    {effect}\n   change:   {change}\n   rule:     {rule}\n\n",
            index + 1,
        );
    }
    let _ = match findings.len() {
        0 => writeln!(text, "{workers} workers: nothing found"),
        1 => writeln!(text, "{workers} workers: 1 finding"),
        count => writeln!(
            text,
            "{workers} workers: {count} findings, the most expensive first"
        ),
    };
    text
}

#[cfg(test)]
mod tests;
