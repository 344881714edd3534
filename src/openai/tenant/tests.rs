use std::pin::pin;
use std::task::{Context, Poll, Waker};

use hyper::header::HeaderValue;

use super::*;
use crate::http::drain::Tasks;

fn tenant(name: &str, keys: &[&str]) -> TenantSpec {
    TenantSpec {
        name: name.to_owned(),
        keys: keys.iter().copied().map(Secret::new).collect(),
        ..TenantSpec::default()
    }
}

/// SHA-256 of `sk-example`.
const DIGESTED: &str = "sha256:f2d4b279b82ad92867af5878fe7482caebdd7b75499868d0362a6e63ff51f046";

fn tenants(listed: &[TenantSpec], registry: &Registry) -> Tenants {
    let verifier = jwt::Verifier::new(Arc::default(), Tasks::default(), registry);
    Tenants::new(listed, None, Arc::new(verifier), registry)
}

/// API keys never wait.
fn admit(tenants: &Tenants, headers: &HeaderMap) -> Result<Tenant, ApiError> {
    let mut admitting = pin!(tenants.admit(headers));
    let mut context = Context::from_waker(Waker::noop());
    match admitting.as_mut().poll(&mut context) {
        Poll::Ready(admitted) => admitted.map(|admitted| admitted.tenant),
        Poll::Pending => panic!("an API key has to wait"),
    }
}

fn check_bearer(lines: &[&str], expected: Option<&str>) {
    let mut headers = HeaderMap::new();
    for line in lines {
        headers.append(header::AUTHORIZATION, HeaderValue::from_str(line).unwrap());
    }
    assert_eq!(bearer(&headers), expected.map(str::as_bytes), "{lines:?}");
}

#[test]
fn a_key_is_the_one_bearer_token() {
    check_bearer(&[], None);
    check_bearer(&["Bearer k"], Some("k"));
    check_bearer(&["bearer   k "], Some("k"));
    check_bearer(&["Bearer"], None);
    check_bearer(&["Bearer  "], None);
    check_bearer(&["Bearerk"], None);
    check_bearer(&["Basic azpr"], None);
    check_bearer(&["Bearer k", "Bearer k"], None);
}

#[test]
fn a_request_is_its_keys_tenant_and_counted() {
    let registry = Registry::default();
    let listed = [tenant("a", &["sk-a", DIGESTED]), tenant("b", &["sk-b"])];
    assert_eq!(check(&listed, false), []);
    let tenants = tenants(&listed, &registry);
    let of = |key: &str| {
        let mut headers = HeaderMap::new();
        let value = HeaderValue::from_str(&format!("Bearer {key}")).unwrap();
        headers.insert(header::AUTHORIZATION, value);
        admit(&tenants, &headers).map_err(|error| error.code)
    };
    assert_eq!(of("sk-a").unwrap(), Tenant::of("a"));
    assert_eq!(of("sk-example").unwrap(), Tenant::of("a"));
    assert_eq!(of("sk-b").unwrap(), Tenant::of("b"));
    for wrong in ["sk-", "sk-c", "SK-A", DIGESTED, "sk-a\u{e9}"] {
        assert_eq!(of(wrong), Err("invalid_api_key"), "{wrong}");
    }
    assert!(tenants.require_keys());
    let page = registry.text();
    assert!(
        page.contains("warmroute_tenant_requests_total{tenant=\"a\"} 2"),
        "{page}"
    );
}

#[test]
fn a_tenant_is_found_by_its_name() {
    let registry = Registry::default();
    let named = tenants(
        &[tenant("a", &["sk-a", "sk-b"]), tenant("b", &[])],
        &registry,
    );
    let found = |name: &str| named.of_name(name).map(|caller| caller.tenant);
    assert_eq!(found("a"), Some(Tenant::of("a")));
    assert_eq!(found("b"), Some(Tenant::of("b")));
    assert_eq!(found("default"), None);
    let open = tenants(&[], &Registry::default());
    let tenant = open.of_name("default").map(|caller| caller.tenant);
    assert_eq!(tenant, Some(Tenant::default()));
    assert!(open.of_name("a").is_none());
}

#[test]
fn a_file_may_have_many_keys() {
    let mut file = format!("# of team a\n\nsk-first\r\n  {DIGESTED}\n");
    file.extend((0..10_000).map(|number| format!("sk-{number}\n")));
    let listed = [tenant("a", &[&file, "sk-single"]), tenant("b", &["sk-b"])];
    assert_eq!(check(&listed, false), []);
    let tenants = tenants(&listed, &Registry::default());
    for key in ["sk-first", "sk-example", "sk-9999", "sk-single"] {
        let mut headers = HeaderMap::new();
        let value = HeaderValue::from_str(&format!("Bearer {key}")).unwrap();
        headers.insert(header::AUTHORIZATION, value);
        assert_eq!(admit(&tenants, &headers).unwrap(), Tenant::of("a"), "{key}");
    }
    let wrong = check(&[tenant("a", &["sk-1\nsk 2\nsk-1\n", "#\n"])], false);
    let messages: Vec<&str> = wrong.iter().map(|(_, message)| &**message).collect();
    let expected = [
        "line 2 has characters that no bearer token can have",
        "line 3 is a key of tenants[0] already",
        "has no key, only blank lines and comments",
    ];
    assert_eq!(messages, expected);
}

#[test]
fn one_key_gives_each_tenant_a_salt_of_its_own() {
    let key = Secret::new("0123456789abcdef");
    let salt = |name: &str, key: &Secret| tenant(name, &["k"]).salted(key).cache_salt;
    assert_ne!(salt("a", &key), salt("b", &key));
    assert_eq!(salt("a", &key), salt("a", &key));
    assert_ne!(
        salt("a", &key),
        salt("a", &Secret::new("another key of 16"))
    );
    assert!(salt("a", &Secret::default()).is_empty());
    let own = TenantSpec {
        cache_salt: Secret::new("own"),
        ..tenant("a", &["k"])
    };
    assert_eq!(own.salted(&key).cache_salt, Secret::new("own"));
}

#[test]
fn without_tenants_everybody_is_one() {
    let tenants = tenants(&[], &Registry::default());
    let tenant = admit(&tenants, &HeaderMap::new()).unwrap();
    assert_eq!(tenant, Tenant::default());
    assert!(!tenants.require_keys());
}

#[test]
fn all_that_is_wrong_with_a_list_is_reported_without_its_keys() {
    let listed = [
        tenant("a b", &["x"]),
        tenant("c", &[]),
        tenant("c", &["", "two words", "sha256:12", "x"]),
        TenantSpec {
            cache_salt: Secret::new("s".repeat(1_025)),
            ..tenant("d", &["y", "y"])
        },
    ];
    let problems = check(&listed, false);
    let places: Vec<&str> = problems.iter().map(|(place, _)| &**place).collect();
    let expected = [
        "[0].name",
        "[1].keys",
        "[2].name",
        "[2].keys[0]",
        "[2].keys[1]",
        "[2].keys[2]",
        "[2].keys[3]",
        "[3].keys[1]",
        "[3].cache_salt",
    ];
    assert_eq!(places, expected);
    assert!(
        problems
            .iter()
            .all(|(_, message)| !message.contains("two words"))
    );
}
