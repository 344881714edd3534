//! Discovery by the Kubernetes API: pods that a selector matches, the endpoints of a Service, or an InferencePool.
//!
//! What the API says of a pod decides whether it is a member and whether it drains. Whether its engine answers is asked
//! by the probes, so that nothing here waits for a worker. Settings and metrics are the same in every build; the rest
//! needs the feature `kubernetes`.

#[cfg(feature = "kubernetes")]
mod client;
#[cfg(feature = "kubernetes")]
mod endpoints;
#[cfg(feature = "kubernetes")]
mod failure;
#[cfg(feature = "kubernetes")]
mod follower;
pub mod metrics;
#[cfg(feature = "kubernetes")]
mod objects;
#[cfg(feature = "kubernetes")]
mod pace;
#[cfg(feature = "kubernetes")]
mod served_pods;
pub mod settings;
#[cfg(feature = "kubernetes")]
mod source;
#[cfg(feature = "kubernetes")]
mod table;
#[cfg(feature = "kubernetes")]
mod watch;

#[cfg(feature = "kubernetes")]
pub use self::follower::Kubernetes;
pub use self::metrics::Metrics;
pub use self::settings::Settings;

/// Whether this build can follow the Kubernetes API.
pub const IS_BUILT_IN: bool = cfg!(feature = "kubernetes");
