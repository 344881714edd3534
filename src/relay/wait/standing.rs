//! Where a request stands among those that wait: its priority and its target for the time to the first token. Pure.
//!
//! The client's wish is the first of: the header `x-warmroute-priority`, the header `x-llm-d-inference-objective` (by
//! the names in `queue.objectives`), `priority` in the body (as vLLM reads it: lower is earlier, so its sign changes),
//! `service_tier` in the body. It gets no more than its tenant's `max_priority`.

use std::time::Duration;

use hyper::HeaderMap;
use hyper::header::HeaderName;

use crate::ids::ClientKey;
use crate::prompt::PeekedBody;
use crate::queue::Settings;
use crate::relay::job::{Error, PRIORITY, TTFT_TARGET};
use crate::relay::request::tenants::TenantProfile;
use crate::units::parse_duration;

/// Names of priorities, as llm-d and the Gateway API's inference extension call them now and before.
const OBJECTIVE: [HeaderName; 2] = [
    HeaderName::from_static("x-llm-d-inference-objective"),
    HeaderName::from_static("x-gateway-inference-objective"),
];
/// Targets in milliseconds, of the same.
const TTFT_MS: [HeaderName; 2] = [
    HeaderName::from_static("x-llm-d-slo-ttft-ms"),
    HeaderName::from_static("x-slo-ttft-ms"),
];

/// Names of flows, of the same.
const FAIRNESS_ID: [HeaderName; 2] = [
    HeaderName::from_static("x-llm-d-inference-fairness-id"),
    HeaderName::from_static("x-gateway-inference-fairness-id"),
];

/// What follows `x-` in the names of all headers that are read here.
const BEGINS: [&str; 4] = ["warmroute-", "llm-d-", "gateway-inference-", "slo-"];

/// As good as none. Times are added to it, which must not overflow.
const MAX_TARGET: Duration = Duration::from_secs(86_400);

/// The priority of `service_tier: flex`: in the class below that of requests with no wish.
const FLEX: i32 = -1;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::relay) struct Standing {
    pub(in crate::relay) priority: i32,
    /// `None`: that of the class.
    pub(in crate::relay) ttft_target: Option<Duration>,
    /// Whose turn the request takes. `None`: its tenant's, or its address's.
    pub(in crate::relay) flow: Option<ClientKey>,
}

impl Standing {
    /// That of a batch's line: whatever its body says, it comes after all other requests.
    pub(in crate::relay) const LAST: Self = Self {
        priority: i32::MIN,
        ttft_target: None,
        flow: None,
    };

    pub(in crate::relay) fn of(
        headers: &HeaderMap,
        peek: &PeekedBody<'_>,
        tenant: &TenantProfile,
        settings: &Settings,
    ) -> Result<Self, Error> {
        // Most requests have no such header, and are not searched for each.
        let no_headers = HeaderMap::new();
        let headers = if has_wishes(headers) {
            headers
        } else {
            &no_headers
        };
        let wish = priority_header(headers)?;
        let wish = wish.or_else(|| objective(headers, settings));
        let wish = wish.or_else(|| peek.priority.map(of_vllm));
        let wish = wish.or_else(|| match peek.service_tier.as_deref()? {
            "flex" => Some(FLEX),
            "priority" => Some(tenant.max_priority),
            _ => None,
        });
        Ok(Self {
            priority: wish.unwrap_or(tenant.priority).min(tenant.max_priority),
            ttft_target: ttft_target(headers)?,
            flow: settings.trust_fairness_id.then(|| flow(headers)).flatten(),
        })
    }
}

/// Whether there may be one of the headers that are read here.
fn has_wishes(headers: &HeaderMap) -> bool {
    let mut names = headers.keys().map(HeaderName::as_str);
    names.any(|name| {
        let name = name.strip_prefix("x-");
        name.is_some_and(|name| BEGINS.iter().any(|begin| name.starts_with(begin)))
    })
}

fn of_vllm(priority: i64) -> i32 {
    let negative = priority.saturating_neg();
    negative.clamp(i32::MIN.into(), i32::MAX.into()) as i32
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name)?.to_str().ok().map(str::trim)
}

fn priority_header(headers: &HeaderMap) -> Result<Option<i32>, Error> {
    if !headers.contains_key(PRIORITY) {
        return Ok(None);
    }
    let number = text(headers, &PRIORITY).and_then(|text| text.parse().ok());
    let wrong = Error::BadHeader {
        name: PRIORITY,
        expected: "an integer; a higher one is earlier",
    };
    number.map(Some).ok_or(wrong)
}

fn objective(headers: &HeaderMap, settings: &Settings) -> Option<i32> {
    let name = OBJECTIVE.iter().find_map(|name| text(headers, name))?;
    settings.objectives.get(name).copied()
}

fn flow(headers: &HeaderMap) -> Option<ClientKey> {
    let name = FAIRNESS_ID.iter().find_map(|name| headers.get(name))?;
    let name = name.as_bytes().trim_ascii();
    (!name.is_empty()).then(|| ClientKey::of_flow(name))
}

fn ttft_target(headers: &HeaderMap) -> Result<Option<Duration>, Error> {
    if headers.contains_key(TTFT_TARGET) {
        let target = text(headers, &TTFT_TARGET).and_then(|text| parse_duration(text).ok());
        let target = target.filter(|target| !target.is_zero());
        let wrong = Error::BadHeader {
            name: TTFT_TARGET,
            expected: "a duration such as `2s` or `500ms`",
        };
        return target
            .map(|target| Some(target.min(MAX_TARGET)))
            .ok_or(wrong);
    }
    let ms = TTFT_MS
        .iter()
        .find_map(|name| text(headers, name)?.parse::<f64>().ok());
    let ms = ms.filter(|ms| ms.is_finite() && *ms > 0.0);
    Ok(ms.map(|ms| Duration::from_secs_f64((ms / 1e3).min(MAX_TARGET.as_secs_f64()))))
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::*;

    fn priority(lines: &[(&'static str, &'static str)], peek: PeekedBody<'_>) -> i32 {
        let tenant = TenantProfile {
            priority: 1,
            max_priority: 5,
            ..TenantProfile::default()
        };
        let settings = Settings {
            objectives: [("chat".to_owned(), 4), ("batch".to_owned(), -4)].into(),
            ..Settings::default()
        };
        standing(lines, peek, &tenant, &settings).unwrap().priority
    }

    fn standing(
        lines: &[(&'static str, &'static str)],
        peek: PeekedBody<'_>,
        tenant: &TenantProfile,
        settings: &Settings,
    ) -> Result<Standing, Error> {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.insert(*name, HeaderValue::from_static(value));
        }
        Standing::of(&headers, &peek, tenant, settings)
    }

    fn tier(name: &'static str) -> PeekedBody<'static> {
        PeekedBody {
            service_tier: Some(name.into()),
            ..PeekedBody::default()
        }
    }

    fn vllm(priority: i64) -> PeekedBody<'static> {
        PeekedBody {
            priority: Some(priority),
            ..PeekedBody::default()
        }
    }

    #[test]
    fn a_client_may_lower_itself_and_rise_to_its_tenants_maximum() {
        let none = PeekedBody::default;
        assert_eq!(priority(&[], none()), 1);
        assert_eq!(priority(&[("x-warmroute-priority", "-3")], none()), -3);
        assert_eq!(priority(&[("x-warmroute-priority", "9")], none()), 5);
        assert_eq!(
            priority(&[("x-llm-d-inference-objective", "chat")], none()),
            4
        );
        assert_eq!(
            priority(&[("x-gateway-inference-objective", "batch")], none()),
            -4
        );
        assert_eq!(
            priority(&[("x-llm-d-inference-objective", "else")], none()),
            1
        );
        assert_eq!(priority(&[], tier("flex")), -1);
        assert_eq!(priority(&[], tier("priority")), 5);
        assert_eq!(priority(&[], tier("auto")), 1);
    }

    #[test]
    fn a_fairness_id_counts_only_where_it_is_trusted() {
        let flow = |is_trusted, lines: &[_]| {
            let settings = Settings {
                trust_fairness_id: is_trusted,
                ..Settings::default()
            };
            let tenant = TenantProfile::default();
            let standing = standing(lines, PeekedBody::default(), &tenant, &settings);
            standing.unwrap().flow
        };
        let new = [("x-llm-d-inference-fairness-id", "team-a")];
        let old = [("x-gateway-inference-fairness-id", "team-a")];
        let other = [("x-llm-d-inference-fairness-id", "team-b")];
        assert_eq!(flow(false, &new), None);
        assert!(flow(true, &new).is_some());
        assert_eq!(flow(true, &new), flow(true, &old));
        assert_ne!(flow(true, &new), flow(true, &other));
        assert_eq!(flow(true, &[("x-llm-d-inference-fairness-id", " ")]), None);
        assert_eq!(flow(true, &[]), None);
    }

    #[test]
    fn vllm_counts_the_other_way() {
        assert_eq!(priority(&[], vllm(7)), -7);
        assert_eq!(priority(&[], vllm(-3)), 3);
        assert_eq!(priority(&[], vllm(i64::MIN)), 5);
        assert_eq!(priority(&[], vllm(i64::MAX)), i32::MIN);
        assert_eq!(priority(&[("x-warmroute-priority", "2")], vllm(7)), 2);
    }

    #[test]
    fn a_target_has_a_unit_or_is_in_milliseconds() {
        let (tenant, settings) = (TenantProfile::default(), Settings::default());
        let target = |name, value| {
            let standing = standing(&[(name, value)], PeekedBody::default(), &tenant, &settings);
            standing.map(|standing| standing.ttft_target)
        };
        let two = Some(Duration::from_secs(2));
        assert_eq!(target("x-warmroute-ttft-target", "2s"), Ok(two));
        assert_eq!(target("x-llm-d-slo-ttft-ms", "2000"), Ok(two));
        assert_eq!(target("x-slo-ttft-ms", "2000"), Ok(two));
        assert_eq!(target("x-slo-ttft-ms", "-1"), Ok(None));
        for wrong in ["2", "0s", "soon", ""] {
            assert!(target("x-warmroute-ttft-target", wrong).is_err(), "{wrong}");
        }
        assert!(target("x-warmroute-priority", "high").is_err());
    }
}
