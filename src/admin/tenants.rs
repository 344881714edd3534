//! `GET /tenants`: the tenants, what they may use, and what they use; in short also on `GET /fleet`.

use serde::Serialize;
use serde_json::{Value, json};

use crate::ids::Tenant;
use crate::limits::{LimitRow, Report};
use crate::relay::{Explanation, TenantProfile, TenantTable};

#[derive(Debug, Serialize)]
struct Row {
    name: String,
    /// Absent without limits.
    #[serde(flatten)]
    report: Option<Report>,
}

/// A decision, with what the tenant that was named has left.
#[derive(Debug, Serialize)]
pub(super) struct Explained {
    #[serde(flatten)]
    explanation: Explanation,
    #[serde(skip_serializing_if = "Option::is_none")]
    tenant_limits: Option<Report>,
}

#[derive(Debug, Serialize)]
pub(super) struct LimitsSummary {
    /// How many there are.
    tenants: usize,
    /// Whether this replica counts alone, because there is no Redis or it does not answer.
    is_alone: bool,
    /// The tenants with the smallest part of a limit left.
    closest: Vec<SummaryRow>,
}

#[derive(Debug, Serialize)]
struct SummaryRow {
    name: String,
    running_requests: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    tightest: Option<LimitRow>,
}

/// Tenants on `GET /fleet`; all are on `GET /tenants`.
const CLOSEST: usize = 20;

/// `None` if no tenant has limits.
pub(super) fn summary(table: &TenantTable) -> Option<LimitsSummary> {
    let limited = table.listed().filter_map(|profile| {
        let limits = profile.limits.as_ref()?;
        Some((profile.name.to_string(), limits.report()))
    });
    let mut limited: Vec<(String, Report)> = limited.collect();
    let left = |report: &Report| report.tightest().map_or(1.0, LimitRow::left);
    limited.sort_by(|(a, one), (b, other)| {
        let by_left = left(one).total_cmp(&left(other));
        by_left.then_with(|| a.cmp(b))
    });
    if limited.is_empty() {
        return None;
    }
    let row = |(name, report): &(String, Report)| SummaryRow {
        name: name.clone(),
        running_requests: report.running_requests,
        tightest: report.tightest().cloned(),
    };
    Some(LimitsSummary {
        tenants: limited.len(),
        is_alone: limited.iter().any(|(_, report)| report.is_alone),
        closest: limited.iter().take(CLOSEST).map(row).collect(),
    })
}

pub(super) fn explained(
    explanation: Explanation,
    table: &TenantTable,
    tenant: Option<&str>,
) -> Explained {
    let profile = tenant.map(|name| table.of(Tenant::of(name)));
    let limits = profile.and_then(|profile| profile.limits.as_ref());
    Explained {
        explanation,
        tenant_limits: limits.map(|limits| limits.report()),
    }
}

pub(super) fn page(table: &TenantTable) -> Value {
    let row = |profile: &TenantProfile| Row {
        name: profile.name.to_string(),
        report: profile.limits.as_ref().map(|limits| limits.report()),
    };
    let mut tenants: Vec<Row> = table.listed().map(|profile| row(profile)).collect();
    tenants.sort_by(|a, b| a.name.cmp(&b.name));
    json!({"tenants": tenants})
}
