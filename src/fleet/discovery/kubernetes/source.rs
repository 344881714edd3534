//! What one entry of the configuration follows: pods, slices of endpoints, or a pool and its pods.

use kube::runtime::watcher::Config;

use super::client::ApiContext;
use super::endpoints::{self, LeftOut, PodEndpoint, Rules};
use super::failure::Failure;
use super::objects::{EndpointSlice, InferencePool, Pod};
use super::settings::{Port, Source};
use super::watch::Watch;

/// The label by which the slices of a Service are found.
const SERVICE_LABEL: &str = "kubernetes.io/service-name";

#[derive(Debug)]
pub(super) enum Followed {
    Pods(Watch<Pod>, Port),
    Service(Watch<EndpointSlice>, Option<Port>),
    Pool(Box<PoolAndPods>),
}

#[derive(Debug)]
pub(super) struct PoolAndPods {
    pool: Watch<InferencePool>,
    /// The pods of the pool's selector, once the pool is known.
    pods: Option<(String, Watch<Pod>)>,
}

/// Pods, each with its name, or why it is no worker.
pub(super) type Found = Vec<(String, Result<PodEndpoint, LeftOut>)>;

impl Followed {
    pub(super) fn new(source: &Source, context: &ApiContext) -> Self {
        match source {
            Source::Pods(pods) => Self::Pods(pods_of(context, &pods.selector), pods.port.clone()),
            Source::Service(service) => {
                let label = format!("{SERVICE_LABEL}={}", service.name);
                let slices = Watch::new(context, Config::default().labels(&label));
                Self::Service(slices, service.port.clone())
            }
            Source::InferencePool(pool) => {
                let name = format!("metadata.name={}", pool.name);
                Self::Pool(Box::new(PoolAndPods {
                    pool: Watch::new(context, Config::default().fields(&name)),
                    pods: None,
                }))
            }
        }
    }

    /// Waits until something may have changed. Cancel safe.
    pub(super) async fn changed(&mut self) -> Result<(), Failure> {
        match self {
            Self::Pods(pods, _) => pods.changed().await,
            Self::Service(slices, _) => slices.changed().await,
            Self::Pool(followed) => followed.changed().await,
        }
    }

    /// All pods, once complete lists have shown them.
    pub(super) fn pods(&self, rules: &Rules) -> Option<Found> {
        match self {
            Self::Pods(pods, port) => {
                Some(of_pods(pods.objects()?, std::slice::from_ref(port), rules))
            }
            Self::Service(slices, port) => {
                let found = endpoints::of_slices(slices.objects()?, port.as_ref());
                let name = |endpoint: &PodEndpoint| endpoint.name.clone();
                let named = |endpoint: Result<PodEndpoint, LeftOut>| {
                    (endpoint.as_ref().map(name).unwrap_or_default(), endpoint)
                };
                Some(found.into_iter().map(named).collect())
            }
            Self::Pool(followed) => followed.pods(rules),
        }
    }

    /// Tries every request that following takes. Returns those that failed.
    pub(super) async fn try_requests(&self) -> Vec<Failure> {
        match self {
            Self::Pods(pods, _) => pods.try_requests().await,
            Self::Service(slices, _) => slices.try_requests().await,
            Self::Pool(followed) => {
                let mut failures = followed.pool.try_requests().await;
                let pods = pods_of(&followed.pool.context, "");
                failures.extend(pods.try_requests().await);
                failures
            }
        }
    }

    /// What an operator should know of a fleet without workers.
    pub(super) fn emptiness(&self) -> &'static str {
        match self {
            Self::Pods(..) => "no pod of the selector is ready",
            Self::Service(..) => "the Service does not exist, or has no ready endpoint",
            Self::Pool(followed) => match pool_of(&followed.pool) {
                None => "the InferencePool does not exist",
                Some(_) => "no pod of the InferencePool's selector is ready",
            },
        }
    }
}

impl PoolAndPods {
    async fn changed(&mut self) -> Result<(), Failure> {
        let pods_changed = async {
            match &mut self.pods {
                Some((_, pods)) => pods.changed().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            changed = self.pool.changed() => changed?,
            changed = pods_changed => return changed,
        }
        let selector = pool_of(&self.pool).map(InferencePool::selector);
        // An empty selector would match every pod.
        let selector = selector.filter(|selector| !selector.is_empty());
        if selector.as_ref() != self.pods.as_ref().map(|(selector, _)| selector) {
            self.pods = selector.map(|selector| {
                let watch = pods_of(&self.pool.context, &selector);
                (selector, watch)
            });
        }
        Ok(())
    }

    fn pods(&self, rules: &Rules) -> Option<Found> {
        let pool = self.pool.objects()?.next();
        let Some((_, pods)) = &self.pods else {
            return Some(Vec::new());
        };
        let ports = pool.into_iter().flat_map(|pool| &pool.spec.target_ports);
        let ports: Vec<Port> = ports.map(|port| Port::Number(port.number)).collect();
        Some(of_pods(pods.objects()?, &ports, rules))
    }
}

fn pods_of(context: &ApiContext, selector: &str) -> Watch<Pod> {
    Watch::new(context, Config::default().labels(selector))
}

fn of_pods<'p>(pods: impl Iterator<Item = &'p Pod>, ports: &[Port], rules: &Rules) -> Found {
    let named = |pod: &Pod| {
        let name = pod.metadata.name.clone().unwrap_or_default();
        (name, endpoints::of_pod(pod, ports, rules))
    };
    pods.map(named).collect()
}

fn pool_of(pool: &Watch<InferencePool>) -> Option<&InferencePool> {
    pool.objects()?.next()
}
