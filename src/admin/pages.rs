//! Every page of the operators' listener: its method, its path, its parameters, and who may use it. Pure.

use std::fmt::Write as _;

use hyper::Method;

use super::dashboard::assets;
use super::role::Role;

/// One page. A path has one method.
#[derive(Debug)]
pub(super) struct Page {
    pub(super) name: Name,
    pub(super) method: Method,
    pub(super) path: &'static str,
    /// `None`: everyone who reaches the listener. Then it changes nothing and shows nothing of workers or prompts
    /// but numbers.
    pub(super) needs: Option<Role>,
    /// What may stand in the query. `None`: anything, which is not looked at.
    parameters: Option<&'static [&'static str]>,
    help: &'static str,
}

const READ: Option<Role> = Some(Role::Read);
const OPERATE: Option<Role> = Some(Role::Operate);

/// Declares the pages, with a name for each: method, path, the role that it needs, what may stand in its query, and what the list
/// says of it.
macro_rules! pages {
    ($($name:ident: $method:ident, $path:expr, $needs:expr, $parameters:expr, $help:literal;)*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) enum Name {
            $($name,)*
        }

        /// In the order in which the page at `/` lists them.
        pub(super) static PAGES: [Page; [$($help),*].len()] = [
            $(Page {
                name: Name::$name,
                method: Method::$method,
                path: $path,
                needs: $needs,
                parameters: $parameters,
                help: $help,
            },)*
        ];
    };
}

pages! {
    // The page has no data: it asks for a token, if one is needed, and sends it with what it reads.
    Index: GET, "/", None, None, "the dashboard, for browsers; for others this list";
    List: GET, "/pages", None, None, "this list";
    Asset: GET, assets::FOLDER, None, None, "the dashboard's scripts and styles, below this path";
    DashboardEvents: GET, "/dashboard/events", READ, Some(&[]), "what the dashboard shows, once a second (server-sent events)";
    DashboardWorker: GET, "/dashboard/worker", READ, Some(&["name"]),
        "?name=NAME: one worker, with the KV events of its ranks (JSON)";
    DashboardDecision: GET, "/dashboard/decision", READ, Some(&["number"]),
        "?number=N: a decision that the dashboard shows, with its candidates at that time (JSON)";
    Metrics: GET, "/metrics", None, None, "Prometheus metrics";
    Alive: GET, "/healthz", None, None, "200 while the process lives";
    Ready: GET, "/readyz", None, None,
        "200 while a worker can take requests, or they wait for the first one (and the response store is up, if it is required)";
    Fleet: GET, "/fleet", READ, None, "workers, models, load and other replicas (JSON)";
    Queue: GET, "/queue", READ, None, "requests that wait for a worker with room, by model and priority class (JSON)";
    Kv: GET, "/kv", READ, None, "state of the workers' KV events and of the prefix-cache index (JSON)";
    Responses: GET, "/responses", READ, None, "responses by status, and their store (JSON)";
    Tenants: GET, "/tenants", READ, None, "tenants, their limits and what is left of them (JSON)";
    Webhooks: GET, "/webhooks", READ, None, "endpoints of webhooks: their state, and the events that wait for them (JSON)";
    Config: GET, "/config", READ, None, "the configuration that runs, without its secrets, and how the last reload ended (JSON)";
    // Whoever can compute a block's hash finds out whether a prompt is cached.
    KvBlocks: GET, "/kv/blocks", OPERATE, Some(&["worker", "rank"]), "?worker=NAME&rank=0: every cached block of one rank (JSON)";
    // With a tenant's name it reads that tenant's stored responses, and shows them as tokens.
    Explain: POST, "/explain", OPERATE, Some(&["path", "tenant", "tokens"]),
        "send any request body: every worker's cost, and the decision (JSON); ?path=/v1/responses for another API; \
         &tenant=NAME with that tenant's cache salt and stored responses; &tokens=true shows the prompt's tokens";
    Drain: POST, "/drain", OPERATE, Some(&["worker"]),
        "stop accepting, finish running requests, exit; ?worker=NAME (or address): send that worker no new requests";
    Undrain: POST, "/undrain", OPERATE, Some(&["worker"]), "?worker=NAME (or address): send it requests again";
    EnableWebhook: POST, "/webhooks/enable", OPERATE, Some(&["endpoint"]),
        "?endpoint=NAME: deliver events again to an endpoint that answered 410";
    Reload: POST, "/reload", OPERATE, Some(&[]),
        "read the configuration's file again: what changed, or everything that is wrong with it (JSON)";
}

pub(super) fn find(path: &str) -> Option<&'static Page> {
    let is_page = |page: &&Page| match page.name {
        Name::Asset => path.starts_with(page.path),
        _ => page.path == path,
    };
    PAGES.iter().find(is_page)
}

impl Page {
    /// Refuses a misspelt parameter: `POST /drain?wroker=NAME` must not drain the whole router.
    pub(super) fn check_parameters(&self, query: &str) -> Result<(), String> {
        let Some(known) = self.parameters else {
            return Ok(());
        };
        let mut pairs = form_urlencoded::parse(query.as_bytes());
        match pairs.find(|(key, _)| !known.contains(&&**key)) {
            None => Ok(()),
            Some((unknown, _)) => Err(format!(
                "unknown parameter `{unknown}`; {} knows {}",
                self.path,
                match known {
                    [] => "none".to_owned(),
                    known => known.join(", "),
                }
            )),
        }
    }
}

/// The page at `/pages`.
pub(super) fn index() -> String {
    let mut text =
        "With `admin.token` or `admin.tokens`, pages of the role `read` or `operate` need \
                    `Authorization: Bearer TOKEN`; with `admin.client_names`, a client certificate will do.\n\n"
            .to_owned();
    for page in &PAGES {
        let needs = page.needs.map_or("-", Role::as_str);
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{:4} {:19} {needs:8} {}",
            page.method.as_str(),
            page.path,
            page.help
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// docs/operations.md has this table, too. Add a page to it, and say why it needs no more than its role.
    #[test]
    fn each_page_needs_the_role_that_was_decided_for_it() {
        let decided = [
            ("GET", "/", "-"),
            ("GET", "/pages", "-"),
            ("GET", "/assets/", "-"),
            ("GET", "/dashboard/events", "read"),
            ("GET", "/dashboard/worker", "read"),
            ("GET", "/dashboard/decision", "read"),
            ("GET", "/metrics", "-"),
            ("GET", "/healthz", "-"),
            ("GET", "/readyz", "-"),
            ("GET", "/fleet", "read"),
            ("GET", "/queue", "read"),
            ("GET", "/kv", "read"),
            ("GET", "/responses", "read"),
            ("GET", "/tenants", "read"),
            ("GET", "/webhooks", "read"),
            ("GET", "/config", "read"),
            ("GET", "/kv/blocks", "operate"),
            ("POST", "/explain", "operate"),
            ("POST", "/drain", "operate"),
            ("POST", "/undrain", "operate"),
            ("POST", "/webhooks/enable", "operate"),
            ("POST", "/reload", "operate"),
        ];
        let found: Vec<_> = PAGES
            .iter()
            .map(|page| {
                (
                    page.method.as_str(),
                    page.path,
                    page.needs.map_or("-", Role::as_str),
                )
            })
            .collect();
        assert_eq!(found, decided);
        let docs = include_str!("../../docs/operations.md");
        let rows: Vec<&str> = docs
            .lines()
            .filter(|line| line.starts_with("| `"))
            .collect();
        for (_, path, _) in decided {
            assert!(
                rows.iter().any(|row| row.contains(path)),
                "docs/operations.md lacks {path}"
            );
        }
    }

    #[test]
    fn what_changes_something_needs_operate() {
        for page in PAGES.iter().filter(|page| page.method != Method::GET) {
            assert_eq!(page.needs, OPERATE, "{}", page.path);
        }
    }

    #[test]
    fn a_path_and_a_name_belong_to_one_page() {
        for (index, page) in PAGES.iter().enumerate() {
            let others = || PAGES[..index].iter();
            assert!(
                others().all(|other| other.path != page.path),
                "{}",
                page.path
            );
            assert!(
                others().all(|other| other.name != page.name),
                "{}",
                page.path
            );
            assert!(
                index_lines().any(|line| line.contains(page.help)),
                "{}",
                page.path
            );
        }
    }

    fn index_lines() -> impl Iterator<Item = String> {
        index()
            .lines()
            .map(str::to_owned)
            .collect::<Vec<_>>()
            .into_iter()
    }

    #[test]
    fn a_misspelt_parameter_is_refused() {
        let drain = find("/drain").unwrap();
        assert_eq!(drain.check_parameters("worker=a"), Ok(()));
        assert_eq!(drain.check_parameters(""), Ok(()));
        let refused = "unknown parameter `wroker`; /drain knows worker";
        assert_eq!(drain.check_parameters("wroker=a"), Err(refused.to_owned()));
        assert_eq!(find("/metrics").unwrap().check_parameters("a=b"), Ok(()));
        assert!(find("/drain/").is_none());
        assert_eq!(find("/assets/1/main.js").unwrap().name, Name::Asset);
    }
}
