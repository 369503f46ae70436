//! AWS credentials that change while they are used: of files, containers, web identities.
//!
//! Law 1: credentials are renewed before they expire; those that cannot be renewed stay in use.

use std::fs::read_to_string;
use std::io::ErrorKind;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use object_store::aws::AwsCredential;
use object_store::{CredentialProvider, Error};

use super::profile::{Environment, Profile};

/// Renewal interval of a server's credentials, which are valid for 15 minutes at least.
const SERVER_RENEWAL_INTERVAL: Duration = Duration::from_secs(300);
/// Renewal interval of a file's credentials, which a user may replace at any time.
const FILE_RENEWAL_INTERVAL: Duration = Duration::from_secs(10);
/// Longest answer of a server, in bytes.
const MAX_RESPONSE_BYTES: usize = 64 << 10;

/// Source of credentials.
#[derive(Clone, Debug)]
pub(super) enum CredentialOrigin {
    /// The files of AWS.
    Profile(Environment),
    /// A server that exchanges the token in a file for credentials.
    WebIdentity { endpoint: String, role: String, session: String, token_file: String },
    /// A server next to the container.
    Container { url: String, token_file: Option<String>, token: Option<String> },
}

/// Credentials of a source, with the time of their renewal.
#[derive(Debug)]
pub(super) struct Credentials {
    source: CredentialOrigin,
    client: reqwest::Client,
    cached: draconis_types::lock::Mutex<Option<(Arc<AwsCredential>, Instant)>>,
}

/// Failure to get credentials: permanent or transient.
enum CredentialFailure {
    Refused(String),
    Passing(String),
}

impl Credentials {
    pub fn new(source: CredentialOrigin, timeout: Duration) -> Result<Self, String> {
        let client = reqwest::Client::builder().timeout(timeout).build();
        let client = client.map_err(|error| format!("no client for credentials: {error}"))?;
        Ok(Self { source, client, cached: draconis_types::lock::Mutex::new(None) })
    }

    async fn current_credential(&self) -> Result<Arc<AwsCredential>, CredentialFailure> {
        let cached = self.cached.lock().clone();
        let valid = if matches!(self.source, CredentialOrigin::Profile(_)) {
            FILE_RENEWAL_INTERVAL
        } else {
            SERVER_RENEWAL_INTERVAL
        };
        if let Some((credential, since)) = &cached
            && since.elapsed() < valid
        {
            return Ok(credential.clone());
        }
        match (self.fetch_credential().await, cached) {
            (Ok(credential), _) => {
                let credential = Arc::new(credential);
                let cached = Some((credential.clone(), Instant::now()));
                *self.cached.lock() = cached;
                Ok(credential)
            }
            (Err(_), Some((credential, _))) => Ok(credential),
            (Err(failure), None) => Err(failure),
        }
    }

    async fn fetch_credential(&self) -> Result<AwsCredential, CredentialFailure> {
        match &self.source {
            CredentialOrigin::Profile(environment) => {
                let profile = Profile::read(environment).map_err(CredentialFailure::Refused)?;
                profile_keys(&profile).ok_or_else(|| {
                    CredentialFailure::Refused(format!(
                        "profile '{}' has no keys any more",
                        profile.name
                    ))
                })
            }
            CredentialOrigin::WebIdentity { endpoint, role, session, token_file } => {
                let token = read_token(token_file)?;
                let fields = [
                    ("Action", "AssumeRoleWithWebIdentity"),
                    ("Version", "2011-06-15"),
                    ("RoleArn", role),
                    ("RoleSessionName", session),
                    ("WebIdentityToken", &token),
                ];
                let fields = fields.map(|(name, value)| format!("{name}={}", form_encode(value)));
                let request = self.client.post(endpoint);
                let form = "application/x-www-form-urlencoded";
                let request = request.header("content-type", form).body(fields.join("&"));
                let answer = fetch_response_text(request, endpoint).await?;
                let part = |name: &str| xml_element_text(&answer, name);
                complete_credential(
                    endpoint,
                    part("AccessKeyId"),
                    part("SecretAccessKey"),
                    part("SessionToken"),
                )
            }
            CredentialOrigin::Container { url, token_file, token: text } => {
                let token = match (token_file, text) {
                    (Some(file), _) => Some(read_token(file)?),
                    (None, text) => text.clone(),
                };
                let mut request = self.client.get(url);
                if let Some(token) = token {
                    request = request.header("authorization", token);
                }
                let answer = fetch_response_text(request, url).await?;
                let fields: serde_json::Value = serde_json::from_str(&answer).unwrap_or_default();
                let part = |name: &str| Some(fields.get(name)?.as_str()?.to_owned());
                complete_credential(
                    url,
                    part("AccessKeyId"),
                    part("SecretAccessKey"),
                    part("Token"),
                )
            }
        }
    }
}

/// Return type that `async_trait` makes of `async fn get_credential`.
type CredentialFuture<'a> =
    Pin<Box<dyn Future<Output = object_store::Result<Arc<AwsCredential>>> + Send + 'a>>;

impl CredentialProvider for Credentials {
    type Credential = AwsCredential;

    fn get_credential<'a, 'b>(&'a self) -> CredentialFuture<'b>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(async move {
            self.current_credential().await.map_err(|failure| match failure {
                CredentialFailure::Passing(why) => {
                    Error::Generic { store: "S3", source: why.into() }
                }
                CredentialFailure::Refused(why) => {
                    Error::Unauthenticated { path: "credentials".to_owned(), source: why.into() }
                }
            })
        })
    }
}

/// Returns the keys of a profile, if it has both.
pub(super) fn profile_keys(profile: &Profile) -> Option<AwsCredential> {
    Some(AwsCredential {
        key_id: profile.get("aws_access_key_id")?.to_owned(),
        secret_key: profile.get("aws_secret_access_key")?.to_owned(),
        token: profile.get("aws_session_token").map(str::to_owned),
    })
}

fn read_token(path: &str) -> Result<String, CredentialFailure> {
    let text = read_to_string(path);
    match text {
        Ok(text) => Ok(text.trim().to_owned()),
        Err(error) if error.kind() == ErrorKind::NotFound => Err(CredentialFailure::Refused(
            format!("{path}: no such file of a token for credentials"),
        )),
        Err(error) => {
            Err(CredentialFailure::Refused(format!("{path}: cannot be read: {}", error.kind())))
        }
    }
}

async fn fetch_response_text(
    request: reqwest::RequestBuilder,
    url: &str,
) -> Result<String, CredentialFailure> {
    let passing = |error: reqwest::Error| {
        let mut text = format!("{url} gives no credentials: {error}");
        let mut cause = std::error::Error::source(&error);
        while let Some(error) = cause {
            text = format!("{text}: {error}");
            cause = error.source();
        }
        CredentialFailure::Passing(text)
    };
    let mut response = request.send().await.map_err(passing)?;
    let status = response.status();
    let mut bytes = vec![];
    while let Some(more) = response.chunk().await.map_err(passing)? {
        bytes.extend_from_slice(&more);
        if bytes.len() > MAX_RESPONSE_BYTES {
            return Err(CredentialFailure::Refused(format!(
                "{url}: an answer that is no credentials"
            )));
        }
    }
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let why = || format!("{url} gives no credentials: status code: {status}: {text}");
    match status {
        status if status.is_success() => Ok(text),
        status if status.is_client_error() && status.as_u16() != 429 => {
            Err(CredentialFailure::Refused(why()))
        }
        _ => Err(CredentialFailure::Passing(why())),
    }
}

fn complete_credential(
    url: &str,
    key_id: Option<String>,
    secret_key: Option<String>,
    token: Option<String>,
) -> Result<AwsCredential, CredentialFailure> {
    match (key_id, secret_key) {
        (Some(key_id), Some(secret_key)) => Ok(AwsCredential { key_id, secret_key, token }),
        _ => Err(CredentialFailure::Refused(format!("{url}: the answer has no credentials"))),
    }
}

/// Returns the text of an element. Keys and tokens have nothing that XML would escape.
fn xml_element_text(xml: &str, name: &str) -> Option<String> {
    let (_, rest) = xml.split_once(&format!("<{name}>"))?;
    let (text, _) = rest.split_once(&format!("</{name}>"))?;
    Some(text.trim().to_owned())
}

/// Encodes a value of a form.
fn form_encode(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    let code =
        |byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    text.bytes().map(code).collect()
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;

    /// Starts a server with these answers; returns its address, and in the end the requests.
    fn start_server(answers: &[&str]) -> (String, std::thread::JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        let answers: Vec<String> = answers.iter().map(|answer| (*answer).to_owned()).collect();
        let serve = move |answer: &String| {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = vec![0; 64 << 10];
            let len = stream.read(&mut request).unwrap();
            let mut text = String::from_utf8_lossy(&request[..len]).into_owned();
            if text.starts_with("POST") && text.ends_with("\r\n\r\n") {
                let len = stream.read(&mut request).unwrap();
                text += &String::from_utf8_lossy(&request[..len]);
            }
            let (status, body) = answer.split_once('\n').unwrap();
            let len = body.len();
            let head = format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {len}");
            write!(stream, "{head}\r\n\r\n{body}").unwrap();
            text
        };
        (url, std::thread::spawn(move || answers.iter().map(serve).collect()))
    }

    fn fetch_times(
        source: CredentialOrigin,
        times: usize,
    ) -> Vec<Result<Arc<AwsCredential>, Error>> {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let credentials = Credentials::new(source, Duration::from_secs(5)).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        (0..times).map(|_| runtime.block_on(credentials.get_credential())).collect()
    }

    #[test]
    fn web_identity_is_exchanged_once() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "to+ken\n").unwrap();
        let (endpoint, requests) =
            start_server(&["200 OK\n<R><Credentials><AccessKeyId>A</AccessKeyId>\
            <SecretAccessKey>S</SecretAccessKey><SessionToken>T</SessionToken></Credentials></R>"]);
        let (role, session) = ("arn:aws:iam::1:role/r".to_owned(), "s".to_owned());
        let token_file = file.path().display().to_string();
        let source = CredentialOrigin::WebIdentity { endpoint, role, session, token_file };
        for got in fetch_times(source, 2) {
            let got = got.unwrap();
            assert_eq!((&*got.key_id, &*got.secret_key), ("A", "S"));
            assert_eq!(got.token.as_deref(), Some("T"));
        }
        let requests = requests.join().unwrap();
        let wanted = "&RoleArn=arn%3Aaws%3Aiam%3A%3A1%3Arole%2Fr&RoleSessionName=s&WebIdentityToken=to%2Bken";
        assert!(requests[0].ends_with(wanted), "{requests:?}");
    }

    #[test]
    fn container_is_retried_until_it_answers() {
        let whole = r#"{"AccessKeyId": "A", "SecretAccessKey": "S", "Token": "T"}"#;
        let answers =
            ["503 Busy\nwait", "403 Forbidden\nno", "200 OK\n<html>", &format!("200 OK\n{whole}")];
        let (url, requests) = start_server(&answers);
        let source =
            CredentialOrigin::Container { url, token_file: None, token: Some("mine".to_owned()) };
        let got = fetch_times(source, 5);
        assert!(matches!(got[0], Err(Error::Generic { .. })), "{got:?}");
        assert!(matches!(got[1], Err(Error::Unauthenticated { .. })), "{got:?}");
        assert!(matches!(got[2], Err(Error::Unauthenticated { .. })), "{got:?}");
        assert!(got[3].is_ok() && got[4].is_ok(), "{got:?}");
        let requests = requests.join().unwrap();
        assert!(requests[0].contains("authorization: mine\r\n"), "{requests:?}");
    }

    #[test]
    fn missing_token_file_is_named_in_error() {
        let source = CredentialOrigin::Container {
            url: "http://127.0.0.1:1/".to_owned(),
            token_file: Some("/no/such/token".to_owned()),
            token: None,
        };
        let errors = fetch_times(source, 1)[0].as_ref().unwrap_err().to_string();
        assert!(errors.contains("/no/such/token"), "{errors}");
    }
}
