//! The discovery: one entry of the configuration -> the members that the Kubernetes API says it has.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout};
use tracing::{info, warn};

use super::client::connect;
use super::endpoints::{LeftOut, PodEndpoint, Rules};
use super::failure::{Failure, Pause};
use super::metrics::{EntryMetrics, Metrics};
use super::served_pods::ServedPods;
use super::settings::{Settings, Source};
use super::source::Followed;
use crate::fleet::Member;
use crate::fleet::discovery::Discovery;

/// Events mostly come in groups: those that arrive within this time are one change of the fleet.
const GATHER: Duration = Duration::from_millis(10);

#[derive(Debug)]
pub struct Kubernetes {
    name: String,
    settings: Settings,
    source: Source,
    rules: Rules,
    metrics: EntryMetrics,
    /// None before there is a client, and after a failure that needs a new one.
    followed: Option<Followed>,
    pause: Pause,
    served_pods: ServedPods,
    members: Option<usize>,
    /// Failed while changes were gathered: reported next.
    failure: Option<Failure>,
    is_failing: bool,
    /// Pods that cannot be workers, and why, as logged.
    logged: BTreeSet<(String, LeftOut)>,
}

impl Kubernetes {
    /// `topology`: the label that the workers of a pair must share, or empty. `has_connector`: whether workers may have
    /// roles.
    pub fn new(
        settings: Settings,
        topology: &str,
        has_connector: bool,
        metrics: &Metrics,
    ) -> Result<Self, String> {
        let mut labels = settings.pod_labels.clone();
        if !topology.is_empty() {
            labels.push(topology.to_owned());
        }
        let name = settings.name();
        Ok(Self {
            source: settings.source()?,
            rules: Rules {
                role_label: settings.role_label.clone(),
                labels,
                has_connector,
            },
            metrics: metrics.of_entry(&name),
            name,
            followed: None,
            pause: Pause::new(settings.advanced.max_retry_pause),
            settings,
            served_pods: ServedPods::default(),
            members: None,
            failure: None,
            is_failing: false,
            logged: BTreeSet::new(),
        })
    }

    /// Tries every request that following takes, once. Returns what is wrong.
    pub async fn try_requests(&mut self) -> Vec<String> {
        let limit = self.settings.advanced.list_timeout;
        let tried = async {
            let followed = self.connect().await?;
            Ok(followed.try_requests().await)
        };
        let Ok(tried) = timeout(limit, tried).await else {
            let limit = humantime::format_duration(limit);
            return vec![format!(
                "the Kubernetes API has not answered within {limit}"
            )];
        };
        let failures = tried.unwrap_or_else(|failure| vec![failure]);
        failures.into_iter().map(|failure| failure.text).collect()
    }

    async fn connect(&mut self) -> Result<Followed, Failure> {
        let context = connect(&self.settings, &self.metrics).await?;
        Ok(Followed::new(&self.source, &context))
    }

    /// Waits until something may have changed, and for what comes right after it.
    async fn changed(&mut self) -> Result<(), Failure> {
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        if self.followed.is_none() {
            if let Some(until) = self.pause.until(Instant::now()) {
                sleep_until(until).await;
            }
            let connected = self.connect().await.inspect_err(|failure| {
                self.metrics
                    .failed(failure.request.as_str(), failure.reason);
            });
            self.followed = Some(connected?);
        }
        let followed = self.followed.as_mut().expect("connected just now");
        followed.changed().await?;
        let gather = async {
            loop {
                if let Err(failure) = followed.changed().await {
                    return failure;
                }
            }
        };
        self.failure = timeout(GATHER, gather).await.ok();
        Ok(())
    }

    /// The members, once they are known.
    fn list(&mut self) -> Result<Option<Vec<Member>>, String> {
        let followed = self.followed.as_ref();
        let Some(found) = followed.and_then(|followed| followed.pods(&self.rules)) else {
            return Ok(None);
        };
        // The log has one line for all endpoints of a Service with the same reason: they have no names here.
        let left_out = found.iter().filter(|(_, pod)| pod.is_err()).count();
        let mut pods: Vec<PodEndpoint> = Vec::new();
        let mut reasons = BTreeSet::new();
        for (name, pod) in found {
            match pod {
                Ok(pod) => pods.push(pod),
                Err(reason) => drop(reasons.insert((name, reason))),
            }
        }
        for (pod, reason) in reasons.difference(&self.logged) {
            if let Some(reason) = reason.warning() {
                warn!(discovery = %self.name, pod, reason, "pod is no worker");
            }
        }
        self.logged = reasons;
        let listed = self.served_pods.members(pods, &self.settings.defaults)?;
        let (ready, draining, starting) = (listed.ready, listed.draining, listed.starting);
        self.metrics.pods([ready, draining, starting, left_out]);
        let count = listed.members.len();
        let before = self.members.replace(count);
        if count == 0 && before != Some(0) {
            let reason = followed.map_or("", Followed::emptiness);
            warn!(discovery = %self.name, before, reason, "the Kubernetes API lists no workers; the fleet has none of this entry now");
        }
        Ok(Some(listed.members))
    }

    fn failed(&mut self, failure: Failure) -> String {
        self.is_failing = true;
        if failure.needs_connect {
            self.followed = None;
            self.pause.on_failure(Instant::now(), fastrand::f64());
        }
        failure.text
    }
}

impl Drop for Kubernetes {
    fn drop(&mut self) {
        self.metrics.forget();
    }
}

impl Discovery for Kubernetes {
    fn name(&self) -> &str {
        &self.name
    }

    async fn next(&mut self) -> Result<Vec<Member>, String> {
        loop {
            if let Err(failure) = self.changed().await {
                return Err(self.failed(failure));
            }
            if let Some(members) = self.list()? {
                if std::mem::take(&mut self.is_failing) {
                    info!(discovery = %self.name, "the Kubernetes API answers again");
                }
                return Ok(members);
            }
        }
    }
}
