//! A program without the feature `tls`, which needs a C compiler for each target.

use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;

use draconis_nbd::{Connection, ConnectionError, Export};
use draconis_types::lock::Mutex;
use draconis_types::path_bytes::ShowPath;

use super::Connections;
use super::socket::Socket;

/// Certificates and keys: none.
pub enum ServerConfig {}

pub fn read_directory(dir: &Path) -> anyhow::Result<Arc<ServerConfig>> {
    anyhow::bail!("--tls {}: this program was built without TLS", dir.shown())
}

pub fn serve_client<R: Read + Send, W: Write + Send>(
    _socket: &Arc<Socket>,
    _connection: Connection<R, W>,
    config: Arc<ServerConfig>,
    _exports: &[Export],
    _connections: &Mutex<Connections>,
) -> Result<(), ConnectionError> {
    match *config {}
}
