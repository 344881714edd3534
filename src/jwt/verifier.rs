//! Verifies tokens by the keys of their issuers.

use std::sync::Arc;
use std::time::{Duration, Instant, UNIX_EPOCH};

use super::issuer_keys::{IssuerKeys, Source, Spec};
use super::key_set::KeySet;
use super::metrics::Metrics;
use super::rejection::Rejection;
use super::ring_signatures;
use super::settings::{Advanced, IssuerSettings, Settings};
use super::verify::{Accepted, Unverified, read, verify};
use crate::http::drain::Tasks;
use crate::http::tls::Clients;
use crate::observe;
use crate::observe::metrics::Registry;

/// A verified token is not remembered for longer, so that a clock that was set does not keep one for ever.
const MAX_REMEMBERED: Duration = Duration::from_secs(3_600);

/// Verifies the tokens of one configuration. Keys are shared with the [successor](Verifier::successor).
#[derive(Debug)]
pub struct Verifier {
    issuers: Vec<Issuer>,
    leeway: Duration,
    clients: Arc<Clients>,
    tasks: Tasks,
    metrics: Metrics,
}

#[derive(Debug)]
struct Issuer {
    settings: IssuerSettings,
    keys: Arc<IssuerKeys>,
}

impl Spec {
    fn of(settings: &IssuerSettings, advanced: &Advanced) -> Result<Self, String> {
        Ok(Self {
            issuer: settings.issuer.clone(),
            location: settings.location()?,
            advanced: advanced.clone(),
        })
    }
}

/// Looks once at the keys of each issuer: how many there are, or what is wrong.
pub async fn look_once(
    settings: &Settings,
    clients: &Clients,
) -> Vec<(String, Result<usize, String>)> {
    let mut found = Vec::new();
    for issuer in &settings.issuers {
        let look = async {
            let spec = Spec::of(issuer, &settings.advanced)?;
            let mut source = Source::new(&spec, clients).map_err(|error| error.to_string())?;
            let text = source.read().await?;
            Ok(KeySet::parse(&text)?.len())
        };
        found.push((issuer.issuer.clone(), look.await));
    }
    found
}

/// What a token that was verified stands for.
#[derive(Debug)]
pub struct Verified {
    /// What its claim names.
    pub tenant: String,
    /// The claim.
    pub claim: String,
    pub expires: Instant,
    /// The issuer's number, and the generation of the keys that verified it, as for [`super::Cache`].
    pub by: (usize, u64),
}

impl Verifier {
    /// Verifies none, until it has a successor.
    pub fn new(clients: Arc<Clients>, tasks: Tasks, registry: &Registry) -> Self {
        ring_signatures::install();
        Self {
            issuers: Vec::new(),
            leeway: Duration::ZERO,
            clients,
            tasks,
            metrics: Metrics::new(registry),
        }
    }

    /// The verifier of the next configuration. Issuers that it has too keep their keys; those of others begin to be
    /// read.
    pub fn successor(&self, settings: Option<&Settings>) -> Result<Arc<Self>, String> {
        let advanced = settings.map(|settings| settings.advanced.clone());
        let advanced = advanced.unwrap_or_default();
        let listed = settings.iter().flat_map(|settings| &settings.issuers);
        let issuers = listed.map(|settings| {
            let spec = Spec::of(settings, &advanced)?;
            Ok(Issuer {
                settings: settings.clone(),
                keys: self.keys(spec)?,
            })
        });
        Ok(Arc::new(Self {
            issuers: issuers.collect::<Result<_, String>>()?,
            leeway: advanced.leeway,
            clients: self.clients.clone(),
            tasks: self.tasks.clone(),
            metrics: self.metrics.clone(),
        }))
    }

    fn keys(&self, spec: Spec) -> Result<Arc<IssuerKeys>, String> {
        let running = self.issuers.iter().find(|issuer| issuer.keys.spec == spec);
        if let Some(running) = running {
            return Ok(running.keys.clone());
        }
        let source = Source::new(&spec, &self.clients).map_err(|error| error.to_string())?;
        let keys = IssuerKeys::new(spec, self.metrics.clone());
        let supervisor = self.tasks.supervisor().clone();
        let reading = IssuerKeys::read_for_ever(Arc::downgrade(&keys), source, supervisor);
        self.tasks.spawn_until_stopped(reading);
        Ok(keys)
    }

    /// Whether any token can be accepted.
    pub fn is_on(&self) -> bool {
        !self.issuers.is_empty()
    }

    /// The generation of the keys that an issuer has now.
    pub fn generation(&self, issuer: usize) -> u64 {
        let issuer = self.issuers.get(issuer);
        issuer.map_or(0, |issuer| issuer.keys.generation())
    }

    /// Verifies a token. One whose key is not known waits for a look at its issuer's keys, if there may be one.
    pub async fn verify(&self, token: &str) -> Result<Verified, Rejection> {
        let result = self.result(token).await;
        let label = match &result {
            Ok(_) => "accepted",
            Err(rejection) => rejection.as_str(),
        };
        self.metrics.verifications.with_label_values(&[label]).inc();
        result
    }

    async fn result(&self, token: &str) -> Result<Verified, Rejection> {
        let said = read(token)?;
        // What clients do again and again with a token that has expired costs no signature.
        let today = observe::unix_s();
        if said
            .expires
            .is_some_and(|at| at + self.leeway.as_secs_f64() < today as f64)
        {
            return Err(Rejection::Expired);
        }
        let mut issuers = self.issuers.iter();
        let index = issuers.position(|issuer| issuer.settings.issuer == said.issuer);
        let index = index.ok_or(Rejection::Issuer)?;
        let keys = &self.issuers[index].keys;
        let result = match self.by(index, token, &said) {
            Err(Rejection::UnknownKey | Rejection::NoKeys) if keys.looked_again().await => {
                self.by(index, token, &said)
            }
            result => result,
        };
        match result {
            Err(Rejection::UnknownKey) if !keys.are_current() => Err(Rejection::StaleKeys),
            result => result,
        }
    }

    fn by(&self, index: usize, token: &str, said: &Unverified) -> Result<Verified, Rejection> {
        let Issuer { settings, keys } = &self.issuers[index];
        let keys = keys.current.load();
        let keys = keys.as_ref().ok_or(Rejection::NoKeys)?;
        let Accepted { tenant, expires } =
            verify(token, said, settings, self.leeway.as_secs(), keys)?;
        let today = observe::wall_clock().duration_since(UNIX_EPOCH);
        let left = expires + self.leeway.as_secs_f64() - today.unwrap_or_default().as_secs_f64();
        let left = left.clamp(0.0, MAX_REMEMBERED.as_secs_f64());
        Ok(Verified {
            tenant,
            claim: settings.tenant_claim.clone(),
            expires: observe::now() + Duration::from_secs_f64(left),
            by: (index, keys.generation),
        })
    }
}
