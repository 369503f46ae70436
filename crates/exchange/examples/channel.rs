//! A contract, its server, and a client that lends a buffer. Every reply returns the buffer.
//!
//! `cargo run -p draconis-exchange --example channel`

use std::time::Duration;

use draconis_exchange::{channel, contract};
use draconis_types::{Block, Refusal};

contract! {
    /// Reads letters.
    pub contract Letters served by LettersServer, starting in Ready {
        /// Accepts requests.
        state Ready {
            /// Fills `page` with the letter of that number.
            call read: Read (page: Block) { number: u32 }
                -> AckRead { len: u32 } => Ready | NakRead why Refusal => Ready;
        }
    }
}

struct Clerk;
impl LettersServer for Clerk {
    fn read(&self, request: &mut Read) -> Result<u32, Refusal> {
        let letters = [&b"Dear reader,"[..], b"Yours,"];
        Ok(request.page.copy_in(0, letters.get(request.number as usize).ok_or(Refusal::NotFound)?)
            as u32)
    }
}

/// Runs the example.
pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    let timeout = Duration::from_secs(10);
    let (client, server) = channel::pair::<Letters>();
    std::thread::spawn(move || server.serve(timeout, |message| answer(&Clerk, message)));
    let mut client = channel::RpcClient::new(client, timeout);
    let refused = client.call(Read { page: Block::private(64), number: 7 })?.unwrap_err();
    let letter = client.call(Read { page: refused.page, number: 1 })?.map_err(|nak| nak.why)?;
    assert_eq!(letter.page.bytes().map(|page| &page[..6]), Some(&b"Yours,"[..]));
    println!("a refusal, then a letter of {} bytes", letter.len);
    Ok(())
}
