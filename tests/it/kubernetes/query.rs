//! What a request asks the fake API server for.

use serde_json::Value;

use super::fake::{KINDS, NAMESPACE};

#[derive(Clone, Debug)]
pub(super) struct Query {
    pub(super) plural: &'static str,
    pub(super) name: Option<String>,
    pub(super) is_watch: bool,
    pub(super) allows_bookmarks: bool,
    pub(super) resource_version: Option<u64>,
    pub(super) timeout_seconds: Option<u64>,
    pub(super) limit: Option<usize>,
    pub(super) continue_token: Option<String>,
    labels: Selector,
    /// `metadata.name=...`, the only one that is needed.
    field_name: Option<String>,
}

impl Query {
    /// `/api/v1/namespaces/llm/pods/a?...`; none if there is no such path.
    pub(super) fn of(path: &str, query: &str) -> Option<Self> {
        let (plural, rest) = KINDS.into_iter().find_map(|(plural, _, _, root)| {
            let rest = path.strip_prefix(root)?;
            // Without a namespace: those of all.
            let in_namespace = rest.strip_prefix("/namespaces/");
            let rest = match in_namespace {
                Some(rest) => rest.strip_prefix(NAMESPACE)?,
                None => rest,
            };
            let rest = rest.strip_prefix('/')?.strip_prefix(plural)?;
            Some((plural, rest.to_owned()))
        })?;
        let pairs: Vec<(String, String)> = form_urlencoded::parse(query.as_bytes())
            .into_owned()
            .collect();
        let value = |key: &str| {
            let found = pairs.iter().find(|(name, _)| name == key);
            found
                .map(|(_, value)| value.clone())
                .filter(|value| !value.is_empty())
        };
        let number = |key: &str| value(key).map(|value| value.parse::<u64>().unwrap());
        let is_true = |key: &str| value(key).is_some_and(|value| value == "true" || value == "1");
        let field = value("fieldSelector").map(|selector| {
            let name = selector.strip_prefix("metadata.name=");
            name.unwrap_or_else(|| panic!("the fake has no {selector}"))
                .to_owned()
        });
        Some(Self {
            plural,
            name: rest.strip_prefix('/').map(str::to_owned),
            is_watch: is_true("watch"),
            allows_bookmarks: is_true("allowWatchBookmarks"),
            resource_version: number("resourceVersion"),
            timeout_seconds: number("timeoutSeconds"),
            limit: number("limit")
                .filter(|limit| *limit > 0)
                .map(|limit| limit as usize),
            continue_token: value("continue"),
            labels: Selector::parse(&value("labelSelector").unwrap_or_default()),
            field_name: field,
        })
    }

    pub(super) fn matches(&self, object: &Value) -> bool {
        let is_named = |name: &String| object["metadata"]["name"] == **name;
        self.labels.matches(object) && self.field_name.as_ref().is_none_or(is_named)
    }
}

/// Labels: `a=b`, `a!=b`, `a in (b,c)`, `a`.
#[derive(Clone, Debug)]
pub(super) struct Selector(Vec<Requirement>);

#[derive(Clone, Debug)]
enum Requirement {
    In(String, Vec<String>),
    Not(String, String),
    Exists(String),
}

impl Selector {
    pub(super) fn parse(text: &str) -> Self {
        let mut parts = vec![String::new()];
        let mut depth = 0;
        for letter in text.chars() {
            match letter {
                '(' => depth += 1,
                ')' => depth -= 1,
                ',' if depth == 0 => {
                    parts.push(String::new());
                    continue;
                }
                _ => {}
            }
            parts.last_mut().unwrap().push(letter);
        }
        let parts = parts.iter().map(|part| part.trim());
        Self(
            parts
                .filter(|part| !part.is_empty())
                .map(requirement)
                .collect(),
        )
    }

    pub(super) fn matches(&self, object: &Value) -> bool {
        let label = |key: &String| object["metadata"]["labels"][key].as_str();
        self.0.iter().all(|requirement| match requirement {
            Requirement::In(key, values) => {
                label(key).is_some_and(|found| values.iter().any(|value| value == found))
            }
            Requirement::Not(key, value) => label(key) != Some(value),
            Requirement::Exists(key) => label(key).is_some(),
        })
    }
}

fn requirement(text: &str) -> Requirement {
    if let Some((key, values)) = text.split_once(" in ") {
        let values = values
            .trim()
            .trim_start_matches('(')
            .trim_end_matches(')')
            .split(',');
        let values = values.map(|value| value.trim().to_owned()).collect();
        return Requirement::In(key.trim().to_owned(), values);
    }
    if let Some((key, value)) = text.split_once("!=") {
        return Requirement::Not(key.to_owned(), value.to_owned());
    }
    match text.split_once('=') {
        Some((key, value)) => Requirement::In(
            key.to_owned(),
            vec![value.trim_start_matches('=').to_owned()],
        ),
        None => Requirement::Exists(text.to_owned()),
    }
}

#[test]
fn the_fakes_selectors_match_as_kubernetes_does() {
    let pod = serde_json::json!({"metadata": {"labels": {"app": "vllm", "tier": "a"}}});
    for (selector, expected) in [
        ("", true),
        ("app=vllm", true),
        ("app==vllm", true),
        ("app=other", false),
        ("app=vllm,tier=a", true),
        ("app=vllm,tier=b", false),
        ("tier in (a, b),app", true),
        ("tier in (c)", false),
        ("zone", false),
        ("zone!=x", true),
        ("tier!=a", false),
    ] {
        assert_eq!(
            Selector::parse(selector).matches(&pod),
            expected,
            "{selector}"
        );
    }
}
