//! Who may use which operators' page, over a real connection to a real router.

use warmroute::admin::Tokens;
use warmroute::secret::Secret;

use crate::client;
use crate::cluster::{self, Router};

const READER: &str = "reader-0123456789";
const OPERATOR: &str = "operator-0123456789";

async fn router() -> Router {
    let mut config = cluster::config();
    config.admin.tokens = Tokens {
        read: vec![Secret::new(READER)],
        operate: vec![Secret::new(OPERATOR)],
    };
    Router::here(&config).await
}

/// What the router itself says of its pages: method, path and role of each.
async fn listed(router: &Router) -> Vec<(String, String, String)> {
    let index = client::get(router.admin, "/").await;
    assert_eq!(index.status, 200);
    let mut pages = Vec::new();
    for line in index.text().lines() {
        let mut words = line.split_whitespace().map(str::to_owned);
        let first = words.next().unwrap_or_default();
        if let ("GET" | "POST", Some(path), Some(role)) = (&*first, words.next(), words.next()) {
            pages.push((first, path, role));
        }
    }
    pages
}

#[tokio::test]
async fn every_page_refuses_those_whose_role_is_not_enough() {
    let router = router().await;
    let pages = listed(&router).await;
    assert!(pages.len() > 10, "{pages:?}");
    for (method, path, role) in &pages {
        if path == "/dashboard/events" {
            // Its answer does not end.
            continue;
        }
        // Without a name `/drain` would end the router.
        let target = match method.as_str() {
            "POST" => format!("{path}?worker=unknown"),
            _ => path.clone(),
        };
        let expected = match role.as_str() {
            "-" => [false; 4],
            "read" => [true, true, false, false],
            "operate" => [true, true, true, false],
            other => panic!("{path} has the role {other}"),
        };
        for (token, is_refused) in [
            None,
            Some("unknown-0123456789"),
            Some(READER),
            Some(OPERATOR),
        ]
        .into_iter()
        .zip(expected)
        {
            let bearer = token.map(|token| format!("Bearer {token}"));
            let headers: Vec<_> = bearer
                .iter()
                .map(|bearer| ("authorization", bearer.as_str()))
                .collect();
            let answer = client::send(router.admin, method, &target, &headers, "").await;
            let refused = match token {
                Some(READER) => 403,
                _ => 401,
            };
            assert_eq!(
                answer.status == refused,
                is_refused,
                "{target} {token:?} {}",
                answer.status
            );
            if is_refused {
                let message = answer.json()["error"].to_string();
                assert!(message.contains("`admin.tokens.operate`"), "{message}");
                let challenge = answer.header("www-authenticate");
                assert_eq!(challenge == "Bearer", refused == 401, "{target}");
            }
        }
    }
    let metrics = client::get(router.admin, "/metrics").await;
    let forbidden = "warmroute_admin_refusals_total{reason=\"forbidden\"}";
    assert!(metrics.text().contains(forbidden));
}

#[tokio::test]
async fn a_page_of_another_site_is_refused_with_and_without_a_token() {
    let with_tokens = router().await;
    let bearer = format!("Bearer {OPERATOR}");
    let headers = [
        ("authorization", &*bearer),
        ("origin", "https://example.com"),
    ];
    let answer = client::send(with_tokens.admin, "POST", "/drain", &headers, "").await;
    assert_eq!(answer.status, 403);
    let without = Router::here(&cluster::config()).await;
    let headers = [("sec-fetch-site", "cross-site")];
    let answer = client::send(without.admin, "POST", "/drain", &headers, "").await;
    assert_eq!(answer.status, 403);
}
