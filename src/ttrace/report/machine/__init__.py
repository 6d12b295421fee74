"""Reports for programs: JSON, JUnit, GitHub, rule files."""
