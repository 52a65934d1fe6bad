from __future__ import annotations

from container.image.bill_of_materials import debian_components, document, python_component, system_component


def test_a_python_package_has_its_canonical_name_and_an_escaped_version() -> None:
    assert python_component("PyYAML.Ext_x", "2.13.0+cpu", "MIT", "Parses.") == {
        "type": "library",
        "bom-ref": "pkg:pypi/pyyaml-ext-x@2.13.0%2Bcpu",
        "name": "pyyaml-ext-x",
        "version": "2.13.0+cpu",
        "description": "Parses.",
        "licenses": [{"expression": "MIT"}],
        "purl": "pkg:pypi/pyyaml-ext-x@2.13.0%2Bcpu",
    }


def test_a_debian_package_has_its_architecture() -> None:
    listing = "installed\tlibstdc++6\t12.2.0-14+deb12u1\tamd64\nconfig-files\tgone\t1\tall\n"
    assert [component["purl"] for component in debian_components(listing, "debian")] == [
        "pkg:deb/debian/libstdc%2B%2B6@12.2.0-14%2Bdeb12u1?arch=amd64"
    ]


def test_a_package_of_another_system_says_which() -> None:
    component = system_component("rpm", "amzn", "openssl-libs", "3.2.2-1.amzn2023.0.1", "x86_64")
    assert component["purl"] == "pkg:rpm/amzn/openssl-libs@3.2.2-1.amzn2023.0.1?arch=x86_64"


def test_the_same_packages_give_the_same_bill_and_none_is_listed_twice() -> None:
    one, other = python_component("a", "1", "", ""), system_component("deb", "ubuntu", "b", "2", "all")
    assert document([one, other, one], "0.1") == document([other, one], "0.1")
    bill = document([one], "0.1")
    assert (bill["bomFormat"], bill["specVersion"], bill["components"]) == ("CycloneDX", "1.5", [one])
    assert "licenses" not in one
