//! Values that are secrets whatever their variable is called: well-known shapes, found by one pass over the bytes in linear time.
//!
//! | shape | rule |
//! |---|---|
//! | private keys | `-----BEGIN … PRIVATE KEY`, also in base64; PuTTY, OpenSSH and age keys |
//! | tokens of clouds, forges, model and payment services | a known prefix at the start of a word and enough characters after it |
//! | JSON web tokens | two dotted base64url parts that begin with `{"` |
//! | `Bearer`, `Basic` | the word and what looks like its value |
//! | URLs | a non-empty password, or a long user name alone, before `@`, in any scheme; in `*PROXY*`, `*URL*`, `*DSN*` also without a scheme |
//! | settings | `Password=…`, `AccountKey=…`, `"token": "…"`, `--db-password=…` in connection strings, options and JSON |
//! | netrc, web hooks | `machine … password …`, the addresses of Slack and Discord |
//!
//! Everything is tried on the value as it is and on what percent-decoding makes of it. A password that no rule knows and that is called nothing
//! suspicious cannot be found by any rule: the deployment's `remove` list is for that.
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD};

use crate::environment::contains;
use crate::secret_setting;

/// How often a value may have been percent-encoded over another encoding.
const DECODE_ROUNDS: usize = 3;

/// Whether `value` has the shape of a secret. `upper` is the variable's name in ASCII upper case.
pub(crate) fn is_secret(upper: &[u8], value: &[u8]) -> bool {
    if is_secret_as_is(upper, value) {
        return true;
    }
    let mut current = percent_decoded(value);
    for _ in 0..DECODE_ROUNDS {
        let Some(decoded) = current else { return false };
        if is_secret_as_is(upper, &decoded) {
            return true;
        }
        current = percent_decoded(&decoded);
    }
    false
}

fn is_secret_as_is(upper: &[u8], value: &[u8]) -> bool {
    // Most values are short words and paths: each shape is looked for only where the bytes that it needs are.
    let has = |byte: u8| value.contains(&byte);
    value.len() >= 5
        && (has_token(value)
            || ((has(b'=') || has(b':')) && secret_setting::has_password_setting(value))
            || (has(b'@') && (has_url_password(value) || has_bare_password(upper, value)))
            || has_private_key(value)
            || is_known_phrase(value))
}

/// Which characters a token goes on with.
#[derive(Clone, Copy)]
enum Class {
    /// Letters and digits.
    Alnum,
    /// Letters, digits, `_` and `-`.
    Word,
    /// The same, and at least one digit: the prefix alone could be prose.
    WordWithDigit,
    /// Exactly so many upper-case letters and digits.
    ExactUpper,
}

/// Prefix, class, and how many characters at least follow.
const TOKENS: [(&[u8], Class, usize); 54] = [
    // AWS
    (b"AKIA", Class::ExactUpper, 16),
    (b"ASIA", Class::ExactUpper, 16),
    // GitHub, GitLab, Atlassian, Docker
    (b"ghp_", Class::Alnum, 20),
    (b"gho_", Class::Alnum, 20),
    (b"ghu_", Class::Alnum, 20),
    (b"ghs_", Class::Alnum, 20),
    (b"ghr_", Class::Alnum, 20),
    (b"github_pat_", Class::Word, 20),
    (b"glpat-", Class::Word, 16),
    (b"gldt-", Class::Word, 16),
    (b"glrt-", Class::Word, 16),
    (b"glcbt-", Class::Word, 16),
    (b"glptt-", Class::Word, 16),
    (b"glft-", Class::Word, 16),
    (b"glsoat-", Class::Word, 16),
    (b"ATATT3", Class::Word, 20),
    (b"dckr_pat_", Class::Word, 16),
    // Slack
    (b"xoxa-", Class::Word, 10),
    (b"xoxb-", Class::Word, 10),
    (b"xoxe-", Class::Word, 10),
    (b"xoxe.xox", Class::Word, 10),
    (b"xoxo-", Class::Word, 10),
    (b"xoxp-", Class::Word, 10),
    (b"xoxr-", Class::Word, 10),
    (b"xoxs-", Class::Word, 10),
    (b"xapp-", Class::Word, 10),
    // Google
    (b"AIza", Class::Word, 30),
    (b"ya29.", Class::Word, 20),
    (b"GOCSPX-", Class::Word, 16),
    // Model services
    (b"sk-", Class::WordWithDigit, 20),
    (b"hf_", Class::Alnum, 24),
    (b"gsk_", Class::Alnum, 24),
    (b"xai-", Class::Alnum, 24),
    (b"nvapi-", Class::Word, 24),
    (b"pplx-", Class::Alnum, 24),
    // Payment
    (b"sk_live_", Class::Alnum, 10),
    (b"sk_test_", Class::Alnum, 10),
    (b"rk_live_", Class::Alnum, 10),
    (b"rk_test_", Class::Alnum, 10),
    (b"whsec_", Class::Alnum, 10),
    (b"sq0csp-", Class::Word, 16),
    // Package registries
    (b"npm_", Class::Alnum, 30),
    (b"pypi-", Class::WordWithDigit, 32),
    (b"rubygems_", Class::Alnum, 24),
    // Hosting, monitoring, secrets
    (b"dop_v1_", Class::Alnum, 32),
    (b"doo_v1_", Class::Alnum, 32),
    (b"shpat_", Class::Alnum, 24),
    (b"shpss_", Class::Alnum, 24),
    (b"SG.", Class::Word, 16),
    (b"glsa_", Class::Word, 24),
    (b"hvs.", Class::Word, 20),
    (b"tskey-", Class::Word, 16),
    (b"lin_api_", Class::Alnum, 20),
    (b"AGE-SECRET-KEY-1", Class::Alnum, 16),
];

/// No known token, with its prefix, is shorter: most words need no closer look.
const SHORTEST_TOKEN: usize = 12;

/// A known token, a JSON web token or an `Authorization` value at the start of a word.
fn has_token(value: &[u8]) -> bool {
    let mut previous = b' ';
    for (index, byte) in value.iter().enumerate() {
        let starts_word = !previous.is_ascii_alphanumeric() && byte.is_ascii_alphanumeric();
        previous = *byte;
        if !starts_word {
            continue;
        }
        let word = &value[index..];
        let is_long =
            word.len() >= SHORTEST_TOKEN && word[..SHORTEST_TOKEN].iter().all(|byte| is_word(byte) || *byte == b'.');
        let is_known = is_long
            && (is_web_token(word)
                || TOKENS
                    .iter()
                    .any(|(prefix, class, least)| is_token(word, prefix, *class, *least)));
        if is_known || (matches!(byte, b'b' | b'B') && is_authorization(word)) {
            return true;
        }
    }
    false
}

fn is_token(word: &[u8], prefix: &[u8], class: Class, least: usize) -> bool {
    let Some(rest) = word.strip_prefix(prefix) else {
        return false;
    };
    match class {
        Class::Alnum => run(rest, u8::is_ascii_alphanumeric) >= least,
        Class::Word => run(rest, is_word) >= least,
        Class::WordWithDigit => {
            let length = run(rest, is_word);
            length >= least && rest[..length].iter().any(u8::is_ascii_digit)
        }
        Class::ExactUpper => {
            run(rest, |byte| byte.is_ascii_uppercase() || byte.is_ascii_digit()) == least
                && !rest.get(least).is_some_and(u8::is_ascii_alphanumeric)
        }
    }
}

/// `eyJ` is what `{"` becomes in base64.
fn is_web_token(word: &[u8]) -> bool {
    let header = run(word, is_word);
    let Some(payload) = word[header..].strip_prefix(b".") else {
        return false;
    };
    word.starts_with(b"eyJ") && header >= 12 && payload.starts_with(b"eyJ") && run(payload, is_word) >= 8
}

/// `Bearer <token>` or `Basic <base64 of user:password>`.
fn is_authorization(word: &[u8]) -> bool {
    let after = |scheme: &[u8]| {
        let head = word.get(..scheme.len())?;
        let rest = word.get(scheme.len()..)?;
        (head.eq_ignore_ascii_case(scheme) && rest.starts_with(b" ")).then(|| rest.trim_ascii_start())
    };
    let of_token = |byte: &u8| is_word(byte) || b".~+/=".contains(byte);
    let bearer = after(b"bearer").is_some_and(|token| {
        let length = run(token, of_token);
        length >= 16 && token[..length].iter().any(u8::is_ascii_digit)
    });
    let basic = after(b"basic").is_some_and(|token| {
        let encoded = &token[..run(token, |byte| byte.is_ascii_alphanumeric() || b"+/".contains(byte))];
        encoded.len() >= 4 && STANDARD_NO_PAD.decode(encoded).is_ok_and(|pair| pair.contains(&b':'))
    });
    bearer || basic
}

fn is_word(byte: &u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-')
}

/// How far any one look ahead goes: keeps the whole pass linear when a hostile value begins a word everywhere.
const LONGEST_RUN: usize = 1024;

fn run(bytes: &[u8], member: impl Fn(&u8) -> bool) -> usize {
    bytes.iter().take(LONGEST_RUN).take_while(|byte| member(byte)).count()
}

/// What follows each `needle`.
fn after_each<'a>(value: &'a [u8], needle: &'static [u8]) -> impl Iterator<Item = &'a [u8]> {
    let first = needle.first().copied().unwrap_or_default();
    let starts = value
        .iter()
        .enumerate()
        .filter(move |(_, byte)| **byte == first)
        .map(|(index, _)| index);
    starts.filter_map(move |index| value[index..].strip_prefix(needle))
}

/// What a URL ends with where it stands in text.
fn ends_url(byte: &u8) -> bool {
    byte.is_ascii_whitespace() || matches!(byte, b'"' | b'\'' | b'<' | b'>' | b'`')
}

fn has_url_password(value: &[u8]) -> bool {
    after_each(value, b"://").any(|rest| {
        let authority = &rest[..run(rest, |byte| !ends_url(byte) && !matches!(byte, b'/' | b'?' | b'#'))];
        if let Some(at) = authority.iter().rposition(|byte| *byte == b'@') {
            return is_userinfo_secret(&authority[..at]);
        }
        // A password with a raw `/`, `?` or `#`: what looks like a port is none, and the `@` comes later.
        let Some((host, port)) = split_at_colon(authority) else {
            return false;
        };
        let url = &rest[..run(rest, |byte| !ends_url(byte))];
        !host.starts_with(b"[") && !port.is_empty() && !port.iter().all(u8::is_ascii_digit) && url.contains(&b'@')
    })
}

fn is_userinfo_secret(userinfo: &[u8]) -> bool {
    match split_at_colon(userinfo) {
        Some((_, password)) => !password.is_empty(),
        None => userinfo.len() >= 20 && userinfo.iter().all(is_word) && userinfo.iter().any(u8::is_ascii_digit),
    }
}

fn split_at_colon(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let colon = bytes.iter().position(|byte| *byte == b':')?;
    Some((&bytes[..colon], &bytes[colon + 1..]))
}

/// `user:password@host` where a name says address, `user:password@tcp(host)` anywhere, `jdbc:…:user/password@host`. Not elsewhere: a search path may
/// have `/opt/python@3.11/bin` after a colon.
fn has_bare_password(upper: &[u8], value: &[u8]) -> bool {
    let Some(at) = value.iter().rposition(|byte| *byte == b'@') else {
        return false;
    };
    let (head, host) = (&value[..at], &value[at + 1..]);
    if value.starts_with(b"jdbc:") && !contains(head, b"//") {
        return head
            .iter()
            .rposition(|byte| *byte == b'/')
            .is_some_and(|slash| slash + 1 < head.len());
    }
    let is_address = [&b"PROXY"[..], b"URL", b"URI", b"DSN", b"CONN", b"DATABASE"]
        .iter()
        .any(|word| contains(upper, word));
    let is_dsn = [&b"tcp("[..], b"unix(", b"("].iter().any(|form| host.starts_with(form));
    let plain = |bytes: &[u8]| !bytes.is_empty() && !bytes.iter().any(|byte| ends_url(byte) || *byte == b'/');
    (is_address || is_dsn)
        && split_at_colon(head)
            .is_some_and(|(user, password)| plain(user) && (is_dsn || plain(password)) && !password.is_empty())
}

fn has_private_key(value: &[u8]) -> bool {
    let says_private = |text: &[u8]| contains(&text[..text.len().min(64)], b"PRIVATE KEY");
    after_each(value, b"-----BEGIN").any(says_private)
        || after_each(value, b"LS0tLS1CRUdJTi").any(|rest| {
            // The rest of the first line is enough; a multiple of four characters after the ones already matched.
            let encoded = [
                &b"Ti"[..],
                &rest[..run(rest, |byte| byte.is_ascii_alphanumeric() || b"+/-_".contains(byte)).min(62)],
            ]
            .concat();
            let whole = &encoded[..encoded.len() / 4 * 4];
            STANDARD_NO_PAD
                .decode(whole)
                .or_else(|_| URL_SAFE_NO_PAD.decode(whole))
                .is_ok_and(|text| says_private(&text))
        })
}

fn is_known_phrase(value: &[u8]) -> bool {
    [
        &b"PuTTY-User-Key-File"[..],
        b"b3BlbnNzaC1rZXktdj",
        b"openssh-key-v1",
        b"hooks.slack.com/services/",
        b"webhooks/",
    ]
    .iter()
    .any(|phrase| contains(value, phrase))
        || (contains(value, b"machine ") && contains(value, b"password "))
}

/// The value with every `%41` decoded; none when there is nothing to decode.
fn percent_decoded(value: &[u8]) -> Option<Vec<u8>> {
    let hex = |byte: &u8| {
        char::from(*byte)
            .to_digit(16)
            .and_then(|digit| u8::try_from(digit).ok())
    };
    let (mut decoded, mut changed, mut index) = (Vec::with_capacity(value.len()), false, 0);
    while let Some(byte) = value.get(index) {
        let pair = (*byte == b'%')
            .then(|| Some((hex(value.get(index + 1)?)?, hex(value.get(index + 2)?)?)))
            .flatten();
        decoded.push(pair.map_or(*byte, |(high, low)| high * 16 + low));
        changed |= pair.is_some();
        index += if pair.is_some() { 3 } else { 1 };
    }
    changed.then_some(decoded)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(name: &str, value: &str) -> bool {
        is_secret(name.as_bytes(), value.as_bytes())
    }

    #[test]
    fn secrets_go_whatever_they_are_called() {
        let github = format!("ghp_{}", "a1B2".repeat(9));
        let base64_key = "LS0tLS1CRUdJTiBSU0EgUFJJVkFURSBLRVktLS0tLQpNSUlF";
        for value in [
            "-----BEGIN OPENSSH PRIVATE KEY-----\nb3Bl",
            "x -----BEGIN PGP PRIVATE KEY BLOCK-----",
            base64_key,
            "AKIAIOSFODNN7EXAMPLE",
            "id=ASIAIOSFODNN7EXAMPLE;",
            &github,
            &format!("https://{github}@github.com/o/r"),
            "glpat-abcdefghij0123456789",
            "xoxb-1234567890-abcdef",
            "AIzaSyA0123456789abcdefghijklmnopqrstuv",
            "sk-ant-api03-abcdefghijklmnop0123",
            "sk_live_abcdefghij0123456789",
            "npm_abcdefghijklmnopqrstuvwxyz0123456789",
            "pypi-AgEIcHlwaS5vcmcCJDAxMjM0NTY3ODlhYmNk",
            "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2ln",
            "Authorization: Bearer abcdefgh01234567",
            "header=basic dXNlcjpwYXNz",
            "postgres://u:pw@h/d",
            "postgres://u:p/w#x@h/d",
            "redis://:pw@h",
            "postgres%3A%2F%2Fu%3Apw%40h%2Fd",
            "postgres%253A%252F%252Fu%253Apw%2540h",
            "mongodb+srv://u:p%40w@h1,h2/db",
            "user:pw@tcp(127.0.0.1:3306)/db",
            "jdbc:oracle:thin:scott/tiger@h:1521:x",
            "Server=h;Database=d;User Id=u;Password=p;",
            "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=abc==;",
            "machine h login u password p",
            "https://hooks.slack.com/services/T0/B0/x",
        ] {
            assert!(secret("X", value), "{value}");
        }
        assert!(secret("HTTPS_PROXY", "u:pw@proxy:3128") && secret("DATABASE_URL", "u:pw@h"));
    }

    #[test]
    fn no_known_token_is_shorter_than_the_shortest() {
        for (prefix, _, least) in TOKENS {
            assert!(prefix.len() + least >= SHORTEST_TOKEN, "{}", prefix.escape_ascii());
        }
    }

    #[test]
    fn ordinary_values_stay() {
        for (name, value) in [
            ("PATH", "/usr/bin:/opt/homebrew/opt/python@3.11/bin:/bin"),
            ("LANG", "de_DE.UTF-8"),
            ("LS_COLORS", "rs=0:di=01;34:*.tar=01;31:*.pem=00;33"),
            ("HTTPS_PROXY", "http://proxy.example:3128"),
            ("NO_PROXY", "localhost,127.0.0.1,[::1]"),
            ("NPM_URL", "https://registry.npmjs.org:443/@scope/pkg"),
            ("GIT_URL", "ssh://git@github.com:22/o/r"),
            ("GIT_REMOTE_URL", "git@github.com:o/r.git"),
            ("SSH_CONNECTION", "10.0.0.1 5000 10.0.0.2 22"),
            ("DBUS_SESSION_BUS_ADDRESS", "unix:path=/run/user/1000/bus"),
            ("CERT", "-----BEGIN CERTIFICATE-----\nMIIB"),
            ("CERT64", "LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0tCk1JSUI="),
            ("REGION", "ASIAPACIFIC"),
            ("BRANCH", "task-make-the-risk-sk-model-better"),
            ("PATTERN", "desk-0123456789012345678901234567890"),
            ("LESSOPEN", "| /usr/bin/lesspipe %s"),
            ("PS", "basic training"),
            ("OPTS", "-Xmx2g -Dfile.encoding=UTF-8 --max-tokens=500"),
            ("FMT", "100%25 %zz %"),
            ("EMPTY_PW", "postgres://u:@h/d"),
            ("EMAIL", "someone@example.org"),
            ("V6", "http://[::1]:8080/a@b"),
        ] {
            assert!(!secret(name, value), "{name}={value}");
        }
    }

    /// The best of three, so that other load on the machine does not count.
    fn time_of(units: &[&str], length: usize) -> std::time::Duration {
        let values: Vec<_> = units.iter().map(|unit| unit.repeat(length / unit.len())).collect();
        let once = || {
            let started = std::time::Instant::now();
            let found = values
                .iter()
                .filter(|value| is_secret(b"X_URL", value.as_bytes()))
                .count();
            assert!(found < values.len());
            started.elapsed()
        };
        (0..3).map(|_| once()).min().unwrap_or_default()
    }

    #[test]
    fn a_long_hostile_value_takes_linear_time() {
        let units = [
            "://a:",
            "eyJ.",
            "a@",
            "a-",
            "%25",
            "-----BEGIN",
            "Bearer ",
            "sk-",
            "\"",
            "=:",
            "LS0tLS1CRUdJTi",
        ];
        let (short, long) = (time_of(&units, 2_000), time_of(&units, 16_000));
        assert!(long < short * 24, "eight times the length took {short:?} and {long:?}");
    }
}
