//! `GET /tenants`: the tenants, what they may use, and what they use.

use serde::Serialize;

use crate::ids::Tenant;
use crate::limits::Report;
use crate::relay::{Explanation, TenantProfile, TenantTable};

#[derive(Debug, Serialize)]
pub(super) struct Page {
    tenants: Vec<Row>,
}

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

pub(super) fn page(table: &TenantTable) -> Page {
    let row = |profile: &TenantProfile| Row {
        name: profile.name.to_string(),
        report: profile.limits.as_ref().map(|limits| limits.report()),
    };
    let mut tenants: Vec<Row> = table.listed().map(|profile| row(profile)).collect();
    tenants.sort_by(|a, b| a.name.cmp(&b.name));
    Page { tenants }
}
