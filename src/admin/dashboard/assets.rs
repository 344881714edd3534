//! The dashboard's page: files within the binary, which load nothing from anywhere else.

use std::sync::LazyLock;

use bytes::Bytes;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::{Response, StatusCode};
use sha2::{Digest, Sha256};

use crate::http;

/// The folder that the page's other files are in; after it come their version and their name.
pub(crate) const FOLDER: &str = "/assets/";

/// Stands in the page for [`FOLDER`] with the version.
const PLACEHOLDER: &str = "{{assets}}";

/// No script or style but from this listener, nothing inline, no frames, no forms, no other hosts.
const CONTENT_SECURITY_POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; \
     form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
);
const PERMISSIONS_POLICY: HeaderName = HeaderName::from_static("permissions-policy");
const OPENER_POLICY: HeaderName = HeaderName::from_static("cross-origin-opener-policy");
const RESOURCE_POLICY: HeaderName = HeaderName::from_static("cross-origin-resource-policy");

const JAVASCRIPT: &str = "text/javascript; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SVG: &str = "image/svg+xml";
const TEXT: &str = "text/plain; charset=utf-8";

const HTML: &str = include_str!("assets/index.html");

macro_rules! file {
    ($name:literal, $kind:expr) => {
        ($name, $kind, include_str!(concat!("assets/", $name)))
    };
}

/// Name, content type and content.
const FILES: &[(&str, &str, &str)] = &[
    file!("style.css", CSS),
    file!("icon.svg", SVG),
    file!("main.js", JAVASCRIPT),
    file!("stream.js", JAVASCRIPT),
    file!("model.js", JAVASCRIPT),
    file!("format.js", JAVASCRIPT),
    file!("dom.js", JAVASCRIPT),
    file!("table.js", JAVASCRIPT),
    file!("charts.js", JAVASCRIPT),
    file!("overview.js", JAVASCRIPT),
    file!("fleet.js", JAVASCRIPT),
    file!("decisions.js", JAVASCRIPT),
    file!("explain.js", JAVASCRIPT),
    file!("lists.js", JAVASCRIPT),
    file!("panels.js", JAVASCRIPT),
    file!("side_panels.js", JAVASCRIPT),
    file!("vendor/uPlot.iife.min.js", JAVASCRIPT),
    file!("vendor/uPlot.min.css", CSS),
    file!("vendor/LICENSE.txt", TEXT),
];

/// A hash of all files: another release of the page has other addresses, so each may be cached for ever.
static VERSION: LazyLock<String> = LazyLock::new(|| {
    let mut digest = Sha256::new_with_prefix(HTML);
    for (name, _, content) in FILES {
        digest.update(name);
        digest.update(content);
    }
    let digest: [u8; 32] = digest.finalize().into();
    digest[..8]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
});

static PAGE: LazyLock<Bytes> = LazyLock::new(|| {
    let folder = format!("{FOLDER}{}", *VERSION);
    Bytes::from(HTML.replace(PLACEHOLDER, &folder))
});

/// The page itself, or 304 for a browser that has it.
pub(crate) fn page(request: &HeaderMap) -> Response<http::Body> {
    let tag = format!("\"{}\"", *VERSION);
    let is_known = request
        .get_all(header::IF_NONE_MATCH)
        .iter()
        .any(|value| value.as_bytes() == tag.as_bytes());
    let mut response = Response::new(http::full(if is_known {
        Bytes::new()
    } else {
        PAGE.clone()
    }));
    if is_known {
        *response.status_mut() = StatusCode::NOT_MODIFIED;
    }
    let headers = response.headers_mut();
    set_common(headers, "text/html; charset=utf-8");
    headers.insert(header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY);
    let none = HeaderValue::from_static("camera=(), geolocation=(), microphone=(), payment=()");
    headers.insert(PERMISSIONS_POLICY, none);
    headers.insert(OPENER_POLICY, HeaderValue::from_static("same-origin"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(header::VARY, HeaderValue::from_static("accept"));
    if let Ok(tag) = HeaderValue::from_str(&tag) {
        headers.insert(header::ETAG, tag);
    }
    response
}

/// One of the page's files, by its path. `None` also for those of another release.
pub(crate) fn file(path: &str) -> Option<Response<http::Body>> {
    let (version, name) = path.strip_prefix(FOLDER)?.split_once('/')?;
    if version != *VERSION {
        return None;
    }
    let (_, kind, content) = FILES.iter().find(|(known, ..)| *known == name)?;
    let mut response = Response::new(http::full(Bytes::from_static(content.as_bytes())));
    let headers = response.headers_mut();
    set_common(headers, kind);
    let forever = HeaderValue::from_static("public, max-age=31536000, immutable");
    headers.insert(header::CACHE_CONTROL, forever);
    Some(response)
}

fn set_common(headers: &mut HeaderMap, kind: &'static str) {
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    let nosniff = HeaderValue::from_static("nosniff");
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, nosniff);
    let no_referrer = HeaderValue::from_static("no-referrer");
    headers.insert(header::REFERRER_POLICY, no_referrer);
    headers.insert(RESOURCE_POLICY, HeaderValue::from_static("same-origin"));
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn every_file_of_the_folder_is_served() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/admin/dashboard/assets");
        let mut found = Vec::new();
        let mut folders = vec![folder.clone()];
        while let Some(next) = folders.pop() {
            for entry in std::fs::read_dir(next).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else {
                    let name = path.strip_prefix(&folder).unwrap();
                    found.push(name.to_str().unwrap().to_owned());
                }
            }
        }
        found.retain(|name| name != "index.html");
        found.sort_unstable();
        let mut served: Vec<&str> = FILES.iter().map(|(name, ..)| *name).collect();
        served.sort_unstable();
        assert_eq!(found, served);
    }

    #[test]
    fn the_pages_files_have_the_version_in_their_path_and_are_cached() {
        let page = String::from_utf8(PAGE.to_vec()).unwrap();
        assert!(!page.contains(PLACEHOLDER));
        let paths: Vec<&str> = page
            .split('"')
            .filter(|text| text.starts_with(FOLDER))
            .collect();
        assert!(paths.len() >= 4, "{paths:?}");
        for path in paths {
            let file = file(path).unwrap_or_else(|| panic!("{path}"));
            let caching = file.headers()[header::CACHE_CONTROL].to_str().unwrap();
            assert!(caching.ends_with("immutable"), "{path}");
        }
        assert!(file("/assets/0000000000000000/main.js").is_none());
        assert!(file(&format!("/assets/{}/none.js", *VERSION)).is_none());
        assert!(file("/assets/").is_none());
    }

    #[test]
    fn a_browser_that_has_the_page_gets_no_second_copy() {
        let first = page(&HeaderMap::new());
        assert_eq!(first.status(), StatusCode::OK);
        let mut request = HeaderMap::new();
        request.insert(header::IF_NONE_MATCH, first.headers()[header::ETAG].clone());
        assert_eq!(page(&request).status(), StatusCode::NOT_MODIFIED);
    }

    /// The page's policy forbids both; a browser would show it as an error.
    #[test]
    fn no_script_or_style_is_inline_and_nothing_is_from_another_host() {
        let page = HTML.to_lowercase();
        assert!(!page.contains("<style") && !page.contains("style="));
        for tag in page.split("<script").skip(1) {
            assert!(tag.trim_start().contains("src="), "{tag}");
        }
        for handler in ["onclick", "onload", "onerror", "javascript:"] {
            assert!(!page.contains(handler), "{handler}");
        }
        let own = FILES
            .iter()
            .filter(|(name, ..)| !name.starts_with("vendor/"));
        for (name, _, content) in own
            .map(|(name, kind, content)| (name, kind, *content))
            .chain([(&"index.html", &"", HTML)])
        {
            let content = content.replace("http://www.w3.org/2000/svg", "");
            assert!(
                !content.contains("http://") && !content.contains("https://"),
                "{name}"
            );
            for unsafe_call in [
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "document.write",
                "eval(",
            ] {
                assert!(!content.contains(unsafe_call), "{name}: {unsafe_call}");
            }
        }
    }
}
