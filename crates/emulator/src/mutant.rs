//! A mutant of a program: one line with other text, to see whether a test notices.

/// `FILE:LINE:FROM=>TO`, as in `ANTIPHON_EMULATOR_MUTANT`: in this line of this file stands TO instead of FROM.
pub(crate) fn wanted() -> Option<String> {
    std::env::var("ANTIPHON_EMULATOR_MUTANT").ok().filter(|mutant| !mutant.is_empty())
}

/// The program with the change. A program without the file stays as it is.
pub(crate) fn apply(source: &str, mutant: &str) -> Result<String, String> {
    let malformed = || format!("ANTIPHON_EMULATOR_MUTANT is FILE:LINE:FROM=>TO, not {mutant}");
    let mut parts = mutant.splitn(3, ':');
    let (Some(file), Some(line), Some(change)) = (parts.next(), parts.next(), parts.next()) else {
        return Err(malformed());
    };
    let wanted: usize = line.parse().map_err(|_| malformed())?;
    let (from, to) = change.split_once("=>").filter(|(from, _)| !from.is_empty()).ok_or_else(malformed)?;
    let (mut name, mut number) = ("", 0);
    let mut result = String::with_capacity(source.len());
    for text in source.split_inclusive('\n') {
        if let Some((line, rest)) = text.strip_prefix("#line ").and_then(|rest| rest.split_once(' ')) {
            name = rest.trim().trim_matches('"');
            number = line.parse::<usize>().map_err(|_| malformed())? - 1;
            result.push_str(text);
            continue;
        }
        number += 1;
        if name != file || number != wanted {
            result.push_str(text);
        } else if text.contains(from) {
            result.push_str(&text.replace(from, to));
        } else {
            return Err(format!("ANTIPHON_EMULATOR_MUTANT: {file}:{wanted} has no {from}: {}", text.trim()));
        }
    }
    Ok(result)
}

#[cfg(test)]
mod tests {
    use super::apply;

    const SOURCE: &str = "#line 1 \"a.cuh\"\none();\ntwo();\n#line 1 \"b.cuh\"\none();\ntwo(); one();\n";

    #[test]
    fn one_line_of_one_file_changes() {
        assert_eq!(apply(SOURCE, "b.cuh:2:one();=>;").unwrap(), SOURCE.replace("two(); one();", "two(); ;"));
        assert_eq!(apply(SOURCE, "a.cuh:1:one=>three").unwrap(), SOURCE.replacen("one", "three", 1));
        assert_eq!(apply(SOURCE, "c.cuh:1:one=>three").unwrap(), SOURCE);
    }

    #[test]
    fn what_is_not_there_is_refused() {
        assert!(apply(SOURCE, "a.cuh:2:one=>three").unwrap_err().contains("a.cuh:2 has no one"));
        for mutant in ["a.cuh", "a.cuh:x:one=>two", "a.cuh:1:one", "a.cuh:1:=>two"] {
            assert!(apply(SOURCE, mutant).unwrap_err().contains("FILE:LINE:FROM=>TO"), "{mutant}");
        }
    }
}
