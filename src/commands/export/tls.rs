//! TLS: certificates, and both directions of a TLS stream over a socket.
//!
//! ```text
//!   reader: socket ─ no lock ─▶ ciphertext ─ session lock ─▶ plain text
//!   writer: plain text ─ session lock ─▶ ciphertext ─ send lock ─▶ socket
//! ```
//!
//! Law 1: keys and certificates are read before confinement.
//! Law 2: nobody waits for the socket while holding the session. So a reply that the client does not
//! read yet does not keep requests from being read, as without TLS.
//! Law 3: ciphertext is sent in the order in which it was made: the send lock is taken first.

use std::io::{self, BufReader, ErrorKind, IoSlice, Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
pub use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConnection};

use draconis_nbd::{Connection, ConnectionError, Export};
use draconis_types::lock::Mutex;
use draconis_types::path_bytes::ShowPath;

use super::socket::{Socket, SocketHalf};
use super::{Connections, serve_exports};

/// Maximum plain text that is encrypted at a time.
const MAX_SEND_BYTES: usize = 256 << 10;
/// Ciphertext that is received at a time: several records.
const RECEIVE_BYTES: usize = 64 << 10;
/// Time that a client has to read the end of the stream.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Reads a directory as qemu-nbd has it: `ca-cert.pem`, `server-cert.pem`, `server-key.pem`, and
/// `ca-crl.pem` if there is one. Clients need a certificate of that authority.
pub fn read_directory(dir: &Path) -> anyhow::Result<Arc<ServerConfig>> {
    let certificates = |name: &str| -> anyhow::Result<Vec<CertificateDer<'static>>> {
        let path = dir.join(name);
        let read = || CertificateDer::pem_file_iter(&path)?.collect::<Result<Vec<_>, _>>();
        let found = read().with_context(|| path.shown().to_string())?;
        ensure!(!found.is_empty(), "{}: no certificate in it", path.shown());
        Ok(found)
    };
    let authority_path = dir.join("ca-cert.pem");
    let mut authorities = RootCertStore::empty();
    for authority in certificates("ca-cert.pem")? {
        authorities.add(authority).with_context(|| authority_path.shown().to_string())?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let authorities = Arc::new(authorities);
    let mut verifier = WebPkiClientVerifier::builder_with_provider(authorities, provider.clone());
    let revoked = dir.join("ca-crl.pem");
    if revoked.exists() {
        let read = || {
            CertificateRevocationListDer::pem_file_iter(&revoked)?.collect::<Result<Vec<_>, _>>()
        };
        verifier = verifier.with_crls(read().with_context(|| revoked.shown().to_string())?);
    }
    let verifier = verifier.build().with_context(|| authority_path.shown().to_string())?;
    let key_path = dir.join("server-key.pem");
    let key = PrivateKeyDer::from_pem_file(&key_path);
    let key = key.with_context(|| key_path.shown().to_string())?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_client_cert_verifier(verifier)
        .with_single_cert(certificates("server-cert.pem")?, key)
        .with_context(|| format!("{}: its certificate and key", dir.shown()))?;
    // A session that is resumed would skip the check of the client.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

/// Serves a client once it has started TLS.
pub fn serve_client<R: Read + Send, W: Write + Send>(
    socket: &Arc<Socket>,
    mut connection: Connection<R, W>,
    config: Arc<ServerConfig>,
    exports: &[Export],
    connections: &Mutex<Connections>,
) -> Result<(), ConnectionError> {
    if !connection.require_tls()? {
        return Ok(());
    }
    let stream = TlsStream::new(socket.clone(), config)?;
    let (reader, writer) = stream.halves();
    let connection = connection.upgrade(reader, writer)?;
    let served = serve_exports(socket, connection, exports, connections);
    stream.close();
    served
}

/// A TLS stream over a socket.
struct TlsStream {
    socket: Arc<Socket>,
    session: Mutex<ServerConnection>,
    sending: Mutex<()>,
}

impl TlsStream {
    /// Starts a TLS session. Reading does the handshake.
    fn new(socket: Arc<Socket>, config: Arc<ServerConfig>) -> io::Result<Arc<Self>> {
        let mut session = ServerConnection::new(config).map_err(io::Error::other)?;
        // Each write is encrypted and sent at once.
        session.set_buffer_limit(None);
        Ok(Arc::new(Self { socket, session: Mutex::new(session), sending: Mutex::new(()) }))
    }

    /// Returns both directions.
    fn halves(self: &Arc<Self>) -> (TlsReader, TlsWriter) {
        let socket = BufReader::with_capacity(RECEIVE_BYTES, SocketHalf(self.socket.clone()));
        (TlsReader { stream: self.clone(), socket }, TlsWriter(self.clone()))
    }

    /// Tells the client that the stream ends.
    fn close(&self) {
        self.socket.set_deadline(Instant::now() + CLOSE_TIMEOUT);
        self.session.lock().send_close_notify();
        let _sending = self.sending.lock();
        self.send_pending().unwrap_or_else(|error| log::debug!("no end of TLS: {error}"));
    }

    /// Sends the ciphertext that the session has. The caller holds the send lock.
    fn send_pending(&self) -> io::Result<()> {
        let mut bytes = vec![];
        let mut session = self.session.lock();
        while session.wants_write() {
            session.write_tls(&mut bytes)?;
        }
        drop(session);
        SocketHalf(self.socket.clone()).write_all(&bytes)
    }

    /// Encrypts and sends some of `parts`.
    fn send(&self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let _sending = self.sending.lock();
        let mut taken = 0;
        let mut session = self.session.lock();
        for part in parts {
            let len = part.len().min(MAX_SEND_BYTES - taken);
            session.writer().write_all(part.get(..len).unwrap_or_default())?;
            taken += len;
        }
        drop(session);
        self.send_pending()?;
        Ok(taken)
    }
}

/// The direction from the client.
struct TlsReader {
    stream: Arc<TlsStream>,
    /// Ciphertext.
    socket: BufReader<SocketHalf>,
}

impl Read for TlsReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        use std::io::BufRead;
        loop {
            match self.stream.session.lock().reader().read(into) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                read => return read,
            }
            let mut bytes = self.socket.fill_buf()?;
            let had = bytes.len();
            if had == 0 {
                // A client that leaves need not end its TLS session.
                return Ok(0);
            }
            let mut session = self.stream.session.lock();
            session.read_tls(&mut bytes)?;
            let used = had - bytes.len();
            let processed = session.process_new_packets();
            let has_answer = session.wants_write();
            drop(session);
            self.socket.consume(used);
            // A writer that is under way sends it otherwise.
            if has_answer && let Some(_sending) = self.stream.sending.try_lock() {
                self.stream.send_pending()?;
            }
            processed.map_err(|error| io::Error::new(ErrorKind::InvalidData, error))?;
        }
    }
}

/// The direction to the client.
struct TlsWriter(Arc<TlsStream>);

impl Write for TlsWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.send(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.send(parts)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
