//! What the command line says of the configuration: values instead of the file's, or without one.

use clap::Args;

/// The flags of `serve` and `check`.
#[derive(Args, Clone, Debug, Default)]
pub struct Flags {
    /// A worker, such as http://10.0.0.11:8000; may be repeated. Added to those of the file.
    #[arg(long = "worker", value_name = "URL")]
    pub workers: Vec<String>,
    /// Address and port for clients, such as :8080; instead of `api.listen`.
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Option<String>,
    /// Address and port for operators, such as 127.0.0.1:9090; instead of `admin.listen`.
    #[arg(long, value_name = "ADDRESS")]
    pub admin_listen: Option<String>,
    /// Address and port for other replicas of this router, such as :9701; instead of `peers.listen`.
    #[arg(long, value_name = "ADDRESS")]
    pub peers_listen: Option<String>,
    /// Address and port for gateways that ask which worker is to get a request (ext_proc), such as :9002; instead of
    /// `endpoint_picker.listen`.
    #[arg(long, value_name = "ADDRESS")]
    pub endpoint_picker_listen: Option<String>,
    /// Another replica, such as 10.0.0.2:9701; may be repeated. Added to those of the file.
    #[arg(long = "peer", value_name = "ADDRESS")]
    pub peers: Vec<String>,
    /// `--allow-missing-files`: of `check`, for a machine without the secrets and certificates.
    #[arg(skip)]
    pub allow_missing_files: bool,
}
