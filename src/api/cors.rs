//! Cross-origin requests: what lets pages of other origins, in browsers, use the API. Pure.

use hyper::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, HeaderName, HeaderValue, ORIGIN, VARY,
};
use hyper::{HeaderMap, Method, Request, Response, StatusCode, Uri};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::http;
use crate::openai::error::ApiError;

/// For this long a browser does not ask again: two hours, since Chromium takes no more.
const MAX_AGE_SECONDS: u64 = 2 * 3_600;

/// Pages of other origins (CORS). Off without `allowed_origins`: browsers let no such page use the API.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Origins whose pages may use the API, such as `https://chat.example.com`, or `*` for all. A page needs a key all
    /// the same, if there are tenants. Empty: none.
    pub allowed_origins: Vec<String>,
    /// Headers that such a page may send. Empty: all that it asks for.
    pub allowed_headers: Vec<String>,
}

impl Settings {
    /// What is wrong with the settings, by key.
    pub fn check(&self) -> Vec<(String, String)> {
        let mut problems = Vec::new();
        for (index, origin) in self.allowed_origins.iter().enumerate() {
            if origin != "*" && !is_origin(origin) {
                let message = format!(
                    "`{origin}` must be `*` or a scheme and a host, such as `https://chat.example.com` or \
                     `http://localhost:3000`, without a path"
                );
                problems.push((format!("allowed_origins[{index}]"), message));
            }
        }
        for (index, name) in self.allowed_headers.iter().enumerate() {
            if HeaderName::from_bytes(name.as_bytes()).is_err() {
                let message = format!("`{name}` is no name of a header");
                problems.push((format!("allowed_headers[{index}]"), message));
            }
        }
        problems
    }
}

fn is_origin(text: &str) -> bool {
    let host = text
        .split_once("://")
        .map_or("", |(_, authority)| authority);
    let is_bare = !host.is_empty() && !host.contains(['/', '?', '#', '@', '*', ' ']);
    is_bare && text.parse::<Uri>().is_ok() && HeaderValue::from_str(text).is_ok()
}

/// A browser asks for the headers that a page has set itself; no page sets as many as this.
const MAX_HEADERS_BYTES: usize = 4 << 10;
const METHODS: HeaderValue = HeaderValue::from_static("GET, POST, DELETE");
/// Besides those that every page may read.
const EXPOSED: HeaderValue = HeaderValue::from_static(
    "x-request-id, request-id, retry-after, retry-after-ms, x-should-retry, \
     x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, \
     x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens, \
     x-warmroute-decision, x-warmroute-store, x-warmroute-state, x-warmroute-tools-left-out",
);
const ANY: HeaderValue = HeaderValue::from_static("*");

/// The rules that settings make.
#[derive(Debug)]
pub(super) struct Cors {
    settings: Settings,
    is_any: bool,
    headers: Option<HeaderValue>,
}

/// What a response says to the page that sent its request.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Grant {
    is_on: bool,
    /// None for a page that may not read the response, and for a client that is no page of another origin.
    origin: Option<HeaderValue>,
}

impl Cors {
    /// The settings have been checked.
    pub(super) fn new(settings: Settings) -> Self {
        let names = settings.allowed_headers.join(", ");
        let headers = HeaderValue::try_from(names).ok();
        Self {
            is_any: settings.allowed_origins.iter().any(|origin| origin == "*"),
            headers: headers.filter(|headers| !headers.is_empty()),
            settings,
        }
    }

    pub(super) fn grant(&self, headers: &HeaderMap) -> Grant {
        if self.settings.allowed_origins.is_empty() {
            return Grant::default();
        }
        let asking = headers.get(ORIGIN);
        let allowed = asking.filter(|asking| {
            let mut listed = self.settings.allowed_origins.iter();
            listed.any(|origin| asking.as_bytes().eq_ignore_ascii_case(origin.as_bytes()))
        });
        let origin = if self.is_any {
            asking.map(|_| ANY)
        } else {
            allowed.cloned()
        };
        Grant {
            is_on: true,
            origin,
        }
    }

    /// The response to a browser that asks whether a page may send a request. It has no key yet.
    pub(super) fn preflight<B>(
        &self,
        request: &Request<B>,
        grant: &Grant,
    ) -> Option<Result<Response<http::Body>, ApiError>> {
        let headers = request.headers();
        let is_preflight = grant.is_on
            && request.method() == Method::OPTIONS
            && headers.contains_key(ORIGIN)
            && headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD);
        if !is_preflight {
            return None;
        }
        if grant.origin.is_none() {
            return Some(Err(ApiError::foreign_origin()));
        }
        let mut response = Response::new(http::full(""));
        *response.status_mut() = StatusCode::NO_CONTENT;
        let answer = response.headers_mut();
        answer.insert(ACCESS_CONTROL_ALLOW_METHODS, METHODS);
        let asked = headers.get(ACCESS_CONTROL_REQUEST_HEADERS);
        let asked = asked.filter(|asked| asked.len() <= MAX_HEADERS_BYTES);
        if let Some(allowed) = self.headers.as_ref().or(asked) {
            answer.insert(ACCESS_CONTROL_ALLOW_HEADERS, allowed.clone());
        }
        let max_age = HeaderValue::from(MAX_AGE_SECONDS);
        answer.insert(ACCESS_CONTROL_MAX_AGE, max_age);
        answer.append(VARY, ACCESS_CONTROL_REQUEST_HEADERS.into());
        Some(Ok(response))
    }
}

impl Grant {
    /// True for a page that may use the API.
    pub(super) fn allows(&self) -> bool {
        self.origin.is_some()
    }

    /// Adds what a browser needs to a response. The relay has left out what an engine said of origins.
    pub(super) fn apply(self, headers: &mut HeaderMap) {
        if !self.is_on {
            return;
        }
        // Engines often say so, too.
        let mut said = headers.get_all(VARY).iter();
        if !said.any(|name| name.as_bytes().eq_ignore_ascii_case(b"origin")) {
            headers.append(VARY, ORIGIN.into());
        }
        if let Some(origin) = self.origin {
            headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
            headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cors(origins: &[&str]) -> Cors {
        Cors::new(Settings {
            allowed_origins: origins.iter().map(|&origin| origin.to_owned()).collect(),
            ..Settings::default()
        })
    }

    fn granted(cors: &Cors, origin: &str) -> Option<String> {
        let mut headers = HeaderMap::new();
        headers.insert(ORIGIN, HeaderValue::from_str(origin).unwrap());
        let mut response = HeaderMap::new();
        cors.grant(&headers).apply(&mut response);
        let allowed = response.get(ACCESS_CONTROL_ALLOW_ORIGIN)?;
        Some(allowed.to_str().unwrap().to_owned())
    }

    #[test]
    fn only_listed_origins_are_granted() {
        let listed = cors(&["https://a.example", "http://localhost:3000"]);
        let own = "https://a.example";
        assert_eq!(granted(&listed, own).as_deref(), Some(own));
        assert!(granted(&listed, "http://localhost:3000").is_some());
        for other in [
            "https://a.example.evil",
            "http://a.example",
            "null",
            "http://localhost",
        ] {
            assert_eq!(granted(&listed, other), None, "{other}");
        }
        assert_eq!(
            granted(&cors(&["*"]), "https://b.example").as_deref(),
            Some("*")
        );
        assert_eq!(granted(&cors(&[]), own), None);
    }

    #[test]
    fn a_client_that_is_no_page_gets_a_mark_for_caches_alone() {
        let mut response = HeaderMap::new();
        let grant = cors(&["https://a.example"]).grant(&HeaderMap::new());
        grant.apply(&mut response);
        assert_eq!(response.len(), 1);
        assert_eq!(response[VARY], "origin");
    }

    #[test]
    fn settings_that_match_no_browser_are_problems() {
        let settings = |origin: &str| Settings {
            allowed_origins: vec![origin.to_owned()],
            ..Settings::default()
        };
        for good in ["*", "https://a.example", "http://[::1]:80", "app://local"] {
            assert_eq!(settings(good).check(), [], "{good}");
        }
        for bad in ["a.example", "https://a/", "https://*.a", "null", "https://"] {
            assert_eq!(settings(bad).check().len(), 1, "{bad}");
        }
        let headers = Settings {
            allowed_headers: vec!["x-a".to_owned(), "x a".to_owned()],
            ..Settings::default()
        };
        assert_eq!(headers.check()[0].0, "allowed_headers[1]");
    }
}
