//! The table of spellings.

use std::collections::HashMap;

use crate::error::LoweringError;

const TABLE: &str = include_str!("spellings.txt");

/// What an operator is: the words behind it.
pub(super) type Spelling = Vec<String>;

/// What operators with roles are, the roles that their arguments must have, and those that they may have.
const WITH_ROLES: [(&str, &[&str], &[&str]); 9] = [
    ("all_reduce", &["x", "group"], &["op"]),
    ("all_gather", &["x", "group"], &["dim", "size"]),
    ("reduce_scatter", &["x", "group"], &["op", "dim", "size"]),
    ("broadcast", &["x", "group", "root"], &[]),
    ("all_to_all", &["x", "group"], &["sends", "receives"]),
    ("rms_norm", &["x", "weight", "eps"], &[]),
    ("add_rms_norm", &["x", "residual", "weight", "eps"], &[]),
    ("fp8", &["x", "scale"], &[]),
    ("fp8_tokens", &["x"], &[]),
];
/// The collectives among them.
const COLLECTIVES: usize = 5;

/// A line of the table for an operator, `namespace::name` or `namespace.name.overload`, whose arguments have these roles, by their places:
/// a collective that is complete when it returns (`all_reduce`, `all_gather`, `reduce_scatter`, `broadcast`, `all_to_all`), or `rms_norm`,
/// `add_rms_norm`, `fp8` and `fp8_tokens`. Without roles the meaning is the words of the table, such as `binary add`.
///
/// # Errors
/// What is unknown, and what is known.
pub fn spelled(operator: &str, meaning: &str, roles: &[(String, usize)]) -> Result<String, LoweringError> {
    let refused = |found: String, wanted: String| Err(LoweringError::unexpected("spelling", found, wanted));
    let name = match operator.split_once("::") {
        Some((namespace, name)) if name.contains('.') => format!("{namespace}.{name}"),
        Some((namespace, name)) => format!("{namespace}.{name}.default"),
        None => operator.to_owned(),
    };
    if name.split('.').count() < 3 || name.split('.').any(str::is_empty) || name.contains(char::is_whitespace)
    {
        return refused(operator.into(), "an operator, namespace::name or namespace.name.overload".into());
    }
    if roles.is_empty() {
        let words: Vec<&str> = meaning.split_whitespace().collect();
        return match super::operator::is_meaning(&words) {
            true => Ok(format!("{name} {}", words.join(" "))),
            false => refused(meaning.into(), "words as in spellings.txt, or roles of the arguments".into()),
        };
    }
    let Some(index) = WITH_ROLES.iter().position(|(known, ..)| *known == meaning) else {
        let known: Vec<&str> = WITH_ROLES.iter().map(|(known, ..)| *known).collect();
        return refused(format!("{meaning} with roles"), known.join(", "));
    };
    let (_, needed, optional) = WITH_ROLES[index];
    let known = [needed, optional].concat();
    let place = |role: &str| roles.iter().find(|(name, _)| name == role).map(|(_, place)| *place);
    let unknown = roles.iter().find(|(role, _)| !known.contains(&role.as_str()));
    let missing = || needed.iter().copied().find(|role| place(role).is_none());
    if let Some(role) = unknown.map(|(role, _)| role.as_str()).or_else(missing) {
        let what = if place(role).is_some() { "the role" } else { "no" };
        return refused(format!("{what} {role}"), format!("{meaning} with {}", known.join(", ")));
    }
    let most = roles.iter().map(|(_, place)| *place).max().unwrap_or(0);
    let is_twice = (0..roles.len()).any(|n| roles[..n].iter().any(|(_, place)| *place == roles[n].1));
    if most > 64 || is_twice {
        return refused(format!("{roles:?}"), "places up to 64, each of one role".into());
    }
    if index >= COLLECTIVES {
        let places: Vec<String> =
            needed.iter().filter_map(|role| place(role)).map(|place| place.to_string()).collect();
        return Ok(format!("{name} {meaning} {}", places.join(" ")));
    }
    if place("x") != Some(0) {
        return refused(format!("x at place {:?}", place("x")), "x at place 0".into());
    }
    let role_at =
        |at: usize| roles.iter().find(|(_, place)| *place == at).map_or("_", |(role, _)| role.as_str());
    let words: Vec<&str> = (1..=most).map(role_at).collect();
    Ok(format!("{name} blocking {meaning} {}", words.join(" ")))
}

/// The table, with lines of a caller that come before.
pub(super) fn table(more: &[String]) -> Result<HashMap<String, Spelling>, LoweringError> {
    let mut table = HashMap::new();
    for line in TABLE.lines().chain(more.iter().map(String::as_str)) {
        let mut words = line.split_whitespace().map(str::to_owned);
        match words.next() {
            Some(target) if !target.starts_with('#') => {
                let spelling: Spelling = words.collect();
                if spelling.is_empty() {
                    return Err(LoweringError::unexpected("spellings", line, "an operator and what it is"));
                }
                table.insert(target, spelling);
            }
            _ => {}
        }
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(operator: &str, meaning: &str, roles: &[(&str, usize)]) -> Result<String, String> {
        let roles: Vec<(String, usize)> = roles.iter().map(|(role, at)| ((*role).to_owned(), *at)).collect();
        spelled(operator, meaning, &roles).map_err(|error| error.to_string())
    }

    #[test]
    fn roles_become_the_words_of_the_table() {
        let vllms = TABLE.lines().find(|line| line.starts_with("vllm.all_reduce.default")).unwrap();
        let words = vllms.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(line("vllm::all_reduce", "all_reduce", &[("x", 0), ("group", 1)]), Ok(words));
        let scatter = line("a::b.c", "reduce_scatter", &[("group", 3), ("x", 0), ("op", 1)]);
        assert_eq!(scatter.as_deref(), Ok("a.b.c blocking reduce_scatter op _ group"));
        let norm = line("mine::norm", "rms_norm", &[("x", 1), ("weight", 0), ("eps", 2)]);
        assert_eq!(norm.as_deref(), Ok("mine.norm.default rms_norm 1 0 2"));
        assert_eq!(
            line("mine.add.default", " binary  add ", &[]).as_deref(),
            Ok("mine.add.default binary add")
        );
    }

    #[test]
    fn what_has_no_meaning_is_refused() {
        let error = |operator, meaning, roles: &[_]| line(operator, meaning, roles).unwrap_err();
        assert!(error("vllm", "all_reduce", &[]).contains("namespace::name"));
        assert!(error("a::b c", "cast", &[]).contains("namespace::name"));
        assert!(error("a::b", "binary fly", &[]).contains("binary fly"));
        assert!(error("a::b", "", &[]).contains("words as in"));
        assert!(error("a::b", "sum", &[("x", 0)]).contains("all_reduce, all_gather"));
        assert!(error("a::b", "all_reduce", &[("x", 0)]).contains("no group"));
        assert!(
            error("a::b", "all_reduce", &[("x", 0), ("group", 1), ("root", 2)]).contains("the role root")
        );
        assert!(error("a::b", "all_reduce", &[("x", 1), ("group", 0)]).contains("x at place 0"));
        assert!(error("a::b", "all_reduce", &[("x", 0), ("group", 0)]).contains("each of one role"));
    }

    #[test]
    fn every_line_of_the_table_has_a_meaning() {
        for (operator, spelling) in table(&[]).unwrap() {
            let words: Vec<&str> = spelling.iter().map(String::as_str).collect();
            assert!(super::super::operator::is_meaning(&words), "{operator} {words:?}");
        }
    }
}
