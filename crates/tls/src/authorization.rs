//! The `authz-*` objects: which clients are allowed.

/// The decision about a client.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Policy {
    /// The client is allowed.
    Allow,
    /// The client is denied.
    #[default]
    Deny,
}

/// How a [`Rule`] compares names.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Format {
    /// The bytes are equal.
    #[default]
    Exact,
    /// A pattern: `*` matches any text, `?` one character.
    Glob,
}

/// A rule of `authz-list`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// The text to compare the name with.
    pub pattern: String,
    /// The decision for names that match.
    pub policy: Policy,
    /// How names are compared.
    pub format: Format,
}

/// Decides by name whether a client is allowed.
///
/// The name of a client with a certificate is the subject (RFC 4514, in the order of the certificate):
/// `C=GB,O=Example,CN=host1`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Authorization {
    /// `authz-simple`: allows one name.
    Simple {
        /// The name.
        identity: String,
    },
    /// `authz-list`: the first rule that matches decides.
    List {
        /// The rules, in order.
        rules: Vec<Rule>,
        /// The decision where no rule matches.
        policy: Policy,
    },
}

impl Authorization {
    /// Returns whether the name is allowed.
    pub fn allows(&self, name: &str) -> bool {
        match self {
            Authorization::Simple { identity } => identity == name,
            Authorization::List { rules, policy } => {
                let rule = rules.iter().find(|rule| rule.fits(name));
                rule.map_or(*policy, |rule| rule.policy) == Policy::Allow
            }
        }
    }
}

impl Rule {
    fn fits(&self, name: &str) -> bool {
        match self.format {
            Format::Exact => self.pattern == name,
            Format::Glob => glob(&self.pattern, name),
        }
    }
}

/// Whether a text matches a pattern with `*` and `?`. Only the last `*` is ever extended, so the time is at most
/// the product of both lengths.
fn glob(pattern: &str, text: &str) -> bool {
    let (pattern, text): (Vec<char>, Vec<char>) =
        (pattern.chars().collect(), text.chars().collect());
    let (mut at, mut place) = (0, 0);
    // Where to resume with one more character for the `*`.
    let mut retry: Option<(usize, usize)> = None;
    while let Some(&next) = text.get(place) {
        match pattern.get(at) {
            Some('*') => {
                at += 1;
                retry = Some((at, place));
            }
            Some(&wanted) if wanted == '?' || wanted == next => {
                at += 1;
                place += 1;
            }
            _ => match &mut retry {
                Some((after, taken)) => {
                    *taken += 1;
                    (at, place) = (*after, *taken);
                }
                None => return false,
            },
        }
    }
    pattern.iter().skip(at).all(|&rest| rest == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_rule_that_fits_decides() {
        let rule = |pattern: &str, policy, format| Rule { pattern: pattern.into(), policy, format };
        let list = Authorization::List {
            rules: vec![
                rule("O=A,CN=bob", Policy::Deny, Format::Exact),
                rule("O=A,CN=*", Policy::Allow, Format::Glob),
                rule("O=A,CN=x", Policy::Deny, Format::Exact),
            ],
            policy: Policy::Deny,
        };
        let allowed = ["O=A,CN=alice", "O=A,CN=bob", "O=A,CN=x", "O=B,CN=alice", ""];
        let allowed = allowed.map(|name| list.allows(name));
        assert_eq!(allowed, [true, false, true, false, false]);
        let open = Authorization::List { rules: Vec::new(), policy: Policy::Allow };
        assert!(open.allows("anybody"));
        let simple = Authorization::Simple { identity: "CN=a".into() };
        assert_eq!(["CN=a", "CN=ab", "CN=A"].map(|name| simple.allows(name)), [true, false, false]);
    }

    #[test]
    fn globs_fit_as_glib_s_patterns_do() {
        for (pattern, text, fits) in [
            ("", "", true),
            ("", "a", false),
            ("*", "", true),
            ("a*", "a", true),
            ("a*c", "abcbc", true),
            ("a*c", "abcb", false),
            ("*a*b*", "xxaxxbxx", true),
            ("*a*b*", "xxbxxaxx", false),
            ("?", "ü", true),
            ("?", "", false),
            ("a?c*", "abcd", true),
            ("a.c", "abc", false),
            ("[ab]", "a", false),
            ("**", "x", true),
        ] {
            assert_eq!(glob(pattern, text), fits, "{pattern} {text}");
        }
        assert!(!glob(&"*a".repeat(50), &"a".repeat(49)));
    }
}
