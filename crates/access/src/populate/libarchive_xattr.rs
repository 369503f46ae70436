//! Encodings of the names and values of extended attributes in archives.
//!
//! ```text
//!   LIBARCHIVE.xattr.user.a%20name=dmFsdWU   names as in addresses of the web, values in base 64
//!   SCHILY.xattr.user.a%3Dname=value         GNU tar codes `%` and `=` in names, nothing else
//! ```

/// Decodes a percent-encoded name; `None` if it is malformed.
pub fn decode_name(coded: &[u8]) -> Option<Vec<u8>> {
    let mut name = vec![];
    let mut rest = coded.iter();
    while let Some(byte) = rest.next() {
        let byte = match byte {
            b'%' => parse_hex_digit(*rest.next()?)? << 4 | parse_hex_digit(*rest.next()?)?,
            byte => *byte,
        };
        name.push(byte);
    }
    Some(name)
}

/// Decodes a base64 value, with or without `=` padding; `None` if it is malformed.
pub fn decode_value(coded: &[u8]) -> Option<Vec<u8>> {
    let end = coded.iter().rposition(|byte| *byte != b'=').map_or(0, |last| last + 1);
    let digits = coded.get(..end)?;
    let mut value = vec![];
    for four in digits.chunks(4) {
        let mut bits = 0u32;
        for digit in four {
            bits = bits << 6 | parse_base64_digit(*digit)?;
        }
        let bytes = (bits << (8 + 6 * (4 - four.len()))).to_be_bytes();
        // A single digit is not a byte.
        value.extend(bytes.get(..four.len().checked_sub(1).filter(|len| *len > 0)?)?);
    }
    Some(value)
}

/// Decodes a name of GNU tar. Other `%` sequences stay as they are.
pub fn decode_gnu_name(coded: &[u8]) -> Vec<u8> {
    let mut name = vec![];
    let mut rest = coded;
    while let Some((byte, more)) = rest.split_first() {
        let (byte, len) = match more.get(..2) {
            Some(b"25") if *byte == b'%' => (b'%', 3),
            Some(b"3D") if *byte == b'%' => (b'=', 3),
            _ => (*byte, 1),
        };
        name.push(byte);
        rest = &rest[len..];
    }
    name
}

/// Encodes a name as GNU tar does.
pub fn encode_gnu_name(name: &[u8]) -> Vec<u8> {
    let code = |byte: &u8| match byte {
        b'%' => b"%25".to_vec(),
        b'=' => b"%3D".to_vec(),
        byte => vec![*byte],
    };
    name.iter().flat_map(code).collect()
}

/// Encodes a value in base64 without padding.
pub fn encode_base64(value: &[u8]) -> Vec<u8> {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut coded = vec![];
    for three in value.chunks(3) {
        let bits = three.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte));
        let bits = bits << (8 * (3 - three.len()));
        let digits = (0..=three.len()).map(|nth| bits >> (18 - 6 * nth) & 63);
        coded.extend(digits.map(|digit| DIGITS[digit as usize]));
    }
    coded
}

fn parse_hex_digit(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).map(|digit| digit as u8)
}

fn parse_base64_digit(digit: u8) -> Option<u32> {
    let value = match digit {
        b'A'..=b'Z' => digit - b'A',
        b'a'..=b'z' => digit - b'a' + 26,
        b'0'..=b'9' => digit - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    };
    Some(value.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_values_decode() {
        assert_eq!(decode_name(b"user.a%20b%2e").unwrap(), b"user.a b.");
        for bad in [&b"%"[..], b"%2", b"%zz"] {
            assert_eq!(decode_name(bad), None);
        }
        for name in [&b"user.a=b%c"[..], b"%%", b"=", b"%3D%25", b"%", b"%2", b"user.plain"] {
            assert_eq!(decode_gnu_name(&encode_gnu_name(name)), name);
        }
        assert_eq!(encode_gnu_name(b"a=b%"), b"a%3Db%25");
        assert_eq!(decode_gnu_name(b"a%20b%"), b"a%20b%");
        for (coded, wanted) in [
            (&b""[..], &b""[..]),
            (b"dg", b"v"),
            (b"dg==", b"v"),
            (b"dmE", b"va"),
            (b"dmFs", b"val"),
            (b"dmFsdWU=", b"value"),
            (b"/+8A", &[0xFF, 0xEF, 0]),
        ] {
            assert_eq!(decode_value(coded).unwrap(), wanted);
            assert_eq!(decode_value(&encode_base64(wanted)).unwrap(), wanted);
        }
        for bad in [&b"d"[..], b"dmFsd", b"d=g=", b"d g"] {
            assert_eq!(decode_value(bad), None);
        }
    }
}
