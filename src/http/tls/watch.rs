//! Looks at the files of all TLS settings now and then.

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tracing::debug;

use super::client::{Clients, Files};
use super::metrics::Metrics;
use super::server::{Current, Server};
use crate::http::file_thread::{FileThread, LookError};
use crate::observe;

/// A volume of Kubernetes follows its Secret within a minute, so this adds nothing to speak of.
const INTERVAL: Duration = Duration::from_secs(2);

/// Uses the files of listeners and of connections to workers as they change, for ever.
pub fn watch(
    servers: Vec<Arc<Server>>,
    clients: Arc<Clients>,
) -> io::Result<impl Future<Output = ()> + Send + 'static> {
    let watch = Watch {
        servers,
        clients,
        thread: Some(start()?),
        hanging: Vec::new(),
    };
    Ok(watch.run())
}

fn start() -> io::Result<FileThread<()>> {
    FileThread::start("tls-files")
}

struct Watch {
    servers: Vec<Arc<Server>>,
    clients: Arc<Clients>,
    /// Looks at all files that do not hang. `None` after one did: the next look needs another one.
    thread: Option<FileThread<()>>,
    /// What hangs, each with the thread that hangs with it. There are as many as settings whose files hang; what a
    /// reload has replaced counts until its files answer. Only files that answer replace it, so that these are few.
    hanging: Vec<(Target, FileThread<()>)>,
}

impl Watch {
    async fn run(mut self) {
        loop {
            self.look().await;
            tokio::time::sleep(INTERVAL).await;
        }
    }

    async fn look(&mut self) {
        self.hanging.retain(|(_, thread)| thread.is_looking());
        let mut targets: Vec<Target> = self.servers.iter().map(Target::listener).collect();
        let metrics = self.clients.metrics();
        let workers = self.clients.used().into_iter();
        targets.extend(workers.map(|files| Target::Workers(files, metrics.cloned())));
        for target in targets {
            let mut hanging = self.hanging.iter();
            if hanging.any(|(hanging, _)| hanging.is_same(&target)) {
                continue;
            }
            if let Err(error) = self.look_at(target).await {
                debug!(%error, "no thread to look at TLS files; they are looked at later");
                return;
            }
        }
    }

    async fn look_at(&mut self, target: Target) -> io::Result<()> {
        let mut thread = match self.thread.take() {
            Some(thread) => thread,
            None => start()?,
        };
        let looked_at = target.clone();
        let looked = thread.look(move || looked_at.look()).await;
        match looked {
            Ok(()) => self.thread = Some(thread),
            Err(error) => {
                target.on_hang(error);
                self.hanging.push((target, thread));
            }
        }
        Ok(())
    }
}

/// Whose files are looked at.
#[derive(Clone)]
enum Target {
    /// A listener with what it uses. When a reload has replaced that it is another one, even with the same settings:
    /// other files may be there now, which answer.
    Listener(Arc<Server>, Arc<Current>),
    Workers(Arc<Files>, Option<Metrics>),
}

impl Target {
    fn listener(server: &Arc<Server>) -> Self {
        Self::Listener(server.clone(), server.current())
    }

    fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Listener(one, current), Self::Listener(two, other)) => {
                Arc::ptr_eq(one, two) && Arc::ptr_eq(current, other)
            }
            (Self::Workers(one, _), Self::Workers(two, _)) => Arc::ptr_eq(one, two),
            (Self::Listener(..), Self::Workers(..)) | (Self::Workers(..), Self::Listener(..)) => {
                false
            }
        }
    }

    /// On the thread.
    fn look(&self) {
        let now = observe::wall_clock();
        match self {
            Self::Listener(server, _) => server.look(now),
            Self::Workers(files, metrics) => files.look(now, metrics.as_ref()),
        }
    }

    fn on_hang(&self, error: LookError) {
        match self {
            Self::Listener(server, current) => server.on_hang(current, error),
            Self::Workers(files, metrics) => files.on_hang(metrics.as_ref(), error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;
    use std::process::Command;

    use rcgen::{CertificateParams, KeyPair};

    use super::*;
    use crate::http::tls::{ClientSettings, Listener, ServerSettings};
    use crate::observe::metrics::Registry;

    const PATIENCE: Duration = Duration::from_millis(50);

    fn settings(folder: &Path) -> ServerSettings {
        let at = |name: &str| folder.join(name).to_str().unwrap().to_owned();
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(["localhost".to_owned()]).unwrap();
        let certificate = params.self_signed(&key).unwrap();
        fs::write(at("tls.crt"), certificate.pem()).unwrap();
        fs::write(at("tls.key"), key.serialize_pem()).unwrap();
        ServerSettings {
            certificate: at("tls.crt"),
            key: at("tls.key"),
            ..ServerSettings::default()
        }
    }

    /// Puts a pipe that nobody writes in the file's place, which hangs each who opens it to read.
    fn hang(file: &str) {
        let pipe = format!("{file}.pipe");
        let made = Command::new("mkfifo").arg(&pipe).status().unwrap();
        assert!(made.success());
        fs::rename(pipe, file).unwrap();
    }

    #[tokio::test]
    async fn files_that_hang_stop_neither_others_nor_a_reload_that_names_others() {
        let folders = [(); 3].map(|()| tempfile::tempdir().unwrap());
        let [first, second, third] = folders.each_ref().map(|folder| settings(folder.path()));
        let registry = Registry::default();
        let metrics = Metrics::new(&registry);
        let server = |listener, settings| Server::new(listener, settings, 8, &metrics).unwrap();
        let servers = vec![
            server(Listener::Api, &first),
            server(Listener::Admin, &second),
        ];
        let mut watch = Watch {
            servers: servers.clone(),
            clients: Arc::default(),
            thread: Some(start().unwrap().with_patience(PATIENCE)),
            hanging: Vec::new(),
        };
        let counted = |which: &str, outcome: &str, times: u32| {
            let name = "warmroute_tls_certificate_reloads_total";
            let line = format!("{name}{{outcome=\"{outcome}\",use=\"{which}\"}} {times}\n");
            registry.text().contains(&line)
        };
        let is_current = |settings: &ServerSettings, value: u32| {
            let name = "warmroute_tls_certificate_last_reload_successful";
            let file = &settings.certificate;
            let line = format!("{name}{{file=\"{file}\",use=\"api\"}} {value}\n");
            registry.text().contains(&line)
        };
        hang(&first.certificate);
        watch.look().await;
        watch.look().await;
        assert_eq!(watch.hanging.len(), 1);
        assert!(counted("api", "failed", 1) && is_current(&first, 0));
        // The other listener's are looked at.
        settings(folders[1].path());
        watch.look().await;
        assert!(counted("admin", "ok", 1));
        // A reload that names other files waits for nothing, and those are looked at.
        servers[0].replace(&third).unwrap();
        assert!(is_current(&third, 1));
        settings(folders[2].path());
        watch.look().await;
        assert!(counted("api", "ok", 1));
        assert_eq!(watch.hanging.len(), 1);
        // What is read at last is not what is in use.
        let pipe = fs::File::options().write(true).open(&first.certificate);
        drop(pipe.unwrap());
        let (target, thread) = watch.hanging.pop().unwrap();
        let mut thread = thread.with_patience(Duration::from_secs(60));
        thread.look(|| ()).await.unwrap();
        watch.hanging.push((target, thread));
        watch.look().await;
        assert!(watch.hanging.is_empty());
        assert!(counted("api", "failed", 1) && is_current(&third, 1));
    }

    /// As after another file system was mounted at the path of the one that hangs.
    #[tokio::test]
    async fn after_a_reload_the_same_paths_are_looked_at_though_a_look_at_them_still_hangs() {
        let folder = tempfile::tempdir().unwrap();
        let own = settings(folder.path());
        let registry = Registry::default();
        let metrics = Metrics::new(&registry);
        let server = Server::new(Listener::Api, &own, 8, &metrics).unwrap();
        let mut watch = Watch {
            servers: vec![server.clone()],
            clients: Arc::default(),
            thread: Some(start().unwrap().with_patience(PATIENCE)),
            hanging: Vec::new(),
        };
        hang(&own.certificate);
        watch.look().await;
        assert_eq!(watch.hanging.len(), 1);
        fs::remove_file(&own.certificate).unwrap();
        settings(folder.path());
        server.replace(&own).unwrap();
        // It stays, so that the next one is another file even within a tick of the clock.
        fs::rename(&own.certificate, folder.path().join("old")).unwrap();
        settings(folder.path());
        watch.look().await;
        let line = "warmroute_tls_certificate_reloads_total{outcome=\"ok\",use=\"api\"} 1\n";
        assert!(registry.text().contains(line));
        assert_eq!(watch.hanging.len(), 1);
    }

    #[tokio::test]
    async fn files_of_workers_that_nobody_uses_any_more_have_no_series_though_a_look_at_them_hangs()
    {
        let folder = tempfile::tempdir().unwrap();
        let own = settings(folder.path());
        let ca = folder.path().join("ca.crt");
        fs::copy(&own.certificate, &ca).unwrap();
        let own = ClientSettings {
            ca: ca.to_str().unwrap().to_owned(),
            certificate: own.certificate,
            key: own.key,
            ..ClientSettings::default()
        };
        let registry = Registry::default();
        let clients = Arc::new(Clients::default());
        clients.set_metrics(Metrics::new(&registry));
        let mut watch = Watch {
            servers: Vec::new(),
            clients: clients.clone(),
            thread: None,
            hanging: Vec::new(),
        };
        let is_named = || registry.text().contains(&own.certificate);
        let client = clients.get(&own);
        watch.look().await;
        assert!(is_named());
        watch.thread = Some(start().unwrap().with_patience(PATIENCE));
        hang(&own.certificate);
        watch.look().await;
        let name = "warmroute_tls_certificate_last_reload_successful";
        let file = &own.certificate;
        let line = format!("{name}{{file=\"{file}\",use=\"workers\"}} 0\n");
        assert!(registry.text().contains(&line));
        drop(client);
        watch.look().await;
        assert_eq!(watch.hanging.len(), 1);
        assert!(!is_named());
        // What is read at last brings none back.
        let pipe = fs::File::options().write(true).open(&own.certificate);
        drop(pipe.unwrap());
        let (_, thread) = watch.hanging.pop().unwrap();
        let mut thread = thread.with_patience(Duration::from_secs(60));
        thread.look(|| ()).await.unwrap();
        assert!(!is_named());
    }

    #[tokio::test]
    async fn files_that_answer_again_are_current_again() {
        let folder = tempfile::tempdir().unwrap();
        let settings = settings(folder.path());
        let registry = Registry::default();
        let metrics = Metrics::new(&registry);
        let server = Server::new(Listener::Api, &settings, 8, &metrics).unwrap();
        let is_current = || {
            let name = "warmroute_tls_certificate_last_reload_successful";
            let text = registry.text();
            let mut lines = text.lines();
            let line = lines.find(|line| line.starts_with(name)).unwrap();
            line.ends_with(" 1")
        };
        assert!(is_current());
        server.on_hang(&server.current(), LookError::Hangs(PATIENCE));
        assert!(!is_current());
        server.look(observe::wall_clock());
        assert!(is_current());
    }
}
